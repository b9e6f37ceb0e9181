"""The first step of a conversion: which attentions of a model are replaced by which, and what can't be."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from klformer.attention import AttentionSpec, attention_capabilities, attention_options
from klformer.conversion.batches import Batches
from klformer.conversion.config import ConversionConfig
from klformer.conversion.hosts import Batch, ConversionError, Host, Site, chosen_sites, evaluating, is_of_transformers
from klformer.conversion.labels import asked_about
from klformer.conversion.own import OwnHost
from klformer.conversion.prune import START_PER_DIM
from klformer.conversion.record import SiteRecord
from klformer.conversion.start import atoms_of
from klformer.errors import ArgumentError, ArgumentTypeError

#: Number of frequencies that stands for as few as an error budget allows, and window for what measures best.
AUTO = "auto"
#: Windows that "auto" chooses from.
WINDOWS = (4, 8, 16, 32)
#: Keys on each side of a query that a converted layer sees exactly, unless another window is asked for.
WINDOW = 8
#: Kernels that learn nothing: what they are is seen without a window.
FIXED = ("performer", "linear-elu")


@dataclass(frozen=True)
class Plan:
    """What a conversion is going to do; nothing has been changed yet."""

    config: ConversionConfig
    attention: AttentionSpec
    teacher: Host
    """The model as it was, with more positions if they are asked for."""
    sites: tuple[Site, ...]
    """All attentions of the model, in the order in which they run."""
    records: Mapping[str, SiteRecord]
    """What is put in, by the names of the sites that are converted."""
    batches: Batches

    @property
    def causal(self) -> bool:
        return next(site.causal for site in self.sites if site.name in self.records)

    @property
    def is_auto(self) -> bool:
        """Whether every layer gets as few frequencies as its error allows."""
        return self.attention.options.get("num_frequencies") == AUTO

    @property
    def chooses_windows(self) -> bool:
        """Whether every layer gets the window that its start measures best."""
        return self.attention.options.get("window") == AUTO


def plan(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    attention: str | AttentionSpec = "atoms-prf",
    options: Mapping[str, Any] | None = None,
    config: ConversionConfig | None = None,
    evaluation: Iterable[Batch] | None = None,
    choosing: Iterable[Batch] | None = None,
) -> Plan:
    """Find the attentions of a model, and what is put in their place: the first step of `klformer.convert`.

    Args:
        model: As there, like all others.
        batches: What the model is called with.
        attention: The attention to put in.
        options: Its options.
        config: Everything else.
        evaluation: Batches to measure by.
        choosing: Batches to choose by.

    Raises:
        ConversionError: the model can't be converted.
        ArgumentError: an argument is not allowed.

    Examples:
        >>> import torch, klformer
        >>> config = klformer.EncoderConfig(model_dim=16, num_layers=2, num_heads=2, attention="softmax")
        >>> batches = [{"x": torch.randn(2, 12, 16)} for _ in range(3)]
        >>> plan = klformer.conversion.plan(klformer.TransformerEncoder(config), batches)
        >>> [(name, record.num_frequencies) for name, record in plan.records.items()]
        [('layers.0.self_attention', 128), ('layers.1.self_attention', 128)]
    """
    config = config or ConversionConfig()
    spec = _spec(attention, options)
    if spec.options.get("num_frequencies") == AUTO and not _has_atoms(spec):
        raise ArgumentError(
            f"num_frequencies={AUTO!r} needs an attention whose atoms can be dropped one by one, which is 'atoms-prf' "
            f"with envelope 'simplex'; for {spec.label()!r} give a number"
        )
    teacher = host_of(model)
    if config.max_positions is not None:
        teacher = host_of(copy.deepcopy(model))
        teacher.extend_positions(config.max_positions, config.extension)
    data = Batches(batches, evaluation, choosing, steps=config.all_steps, seed=config.seed)
    batch = data.held_out[0]
    with evaluating(teacher.model):
        sites = teacher.sites(batch)
        chosen = chosen_sites(sites, config.layers)
        _check_attention(spec, chosen)
        if config.label_weight:
            _check_labels(teacher, batch, causal=chosen[0].causal)
    return Plan(config, spec, teacher, tuple(sites), {site.name: _record(spec, site) for site in chosen}, data)


def host_of(model: nn.Module) -> Host:
    """The ways to the attention of a model.

    Raises:
        ConversionError: there are none.
        ArgumentTypeError: it is not a model.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch module, got {type(model).__name__}")
    if is_of_transformers(model):
        from klformer.conversion.hf import TransformersHost

        return TransformersHost(model)
    return OwnHost(model)


def _spec(attention: str | AttentionSpec, options: Mapping[str, Any] | None) -> AttentionSpec:
    spec = AttentionSpec.of(attention)
    known = attention_options(spec.name)
    # A conversion is to give back one model: the draw is kept unless another is asked for.
    kept: dict[str, Any] = {"redraw": False} if "redraw" in known else {}
    if "near_gain" in known:  # both parts begin with what they would have in softmax
        kept["near_gain"] = 0.0
        if spec.name not in FIXED:
            kept["window"] = WINDOW
    chosen = {**kept, **spec.options, **(options or {})}
    spec = AttentionSpec(name=spec.name, options=chosen)
    return spec if chosen.get("window") else without_window(spec)


def without_window(spec: AttentionSpec) -> AttentionSpec:
    options = {key: value for key, value in spec.options.items() if key not in ("window", "near_gain")}
    return AttentionSpec(name=spec.name, options=options)


def _has_atoms(spec: AttentionSpec) -> bool:
    small = without_window(AttentionSpec(name=spec.name, options={**spec.options, "num_frequencies": 2}))
    return atoms_of(small.build(num_heads=1, head_dim=2)) is not None


def _check_attention(spec: AttentionSpec, sites: list[Site]) -> None:
    can = attention_capabilities(spec.name, **{k: v for k, v in spec.options.items() if v != AUTO})
    if can.needs_max_len:
        raise ConversionError(
            f"attention {spec.label()!r} is made for one longest sequence (max_len): it can't stand in for softmax"
        )
    if not can.causal and any(site.causal for site in sites):
        raise ConversionError(f"attention {spec.name!r} has no causal form, and the model is causal")


def _check_labels(teacher: Host, batch: Batch, *, causal: bool) -> None:
    with torch.no_grad():
        asked = asked_about(teacher, batch, teacher.run(batch), causal=causal)
    if asked is None:
        raise ArgumentError(
            "label_weight must be 0 where batches have no 'labels' that say which class or token is right; got "
            f"batches of {', '.join(sorted(batch))}"
        )


def _record(spec: AttentionSpec, site: Site) -> SiteRecord:
    sizes, spec = site.sizes, without_window(spec) if site.cross else spec
    first = {"num_frequencies": START_PER_DIM * sizes.head_dim, "window": WINDOWS[0]}
    options = {key: first[key] if value == AUTO and key in first else value for key, value in spec.options.items()}
    return SiteRecord(
        attention=AttentionSpec(name=spec.name, options=options).complete(),
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        value_dim=sizes.head_dim if sizes.value_dim is None else sizes.value_dim,
    )
