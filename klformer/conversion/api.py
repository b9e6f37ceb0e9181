"""`klformer.convert`: a trained softmax model becomes linear, its kernels learned from its own queries and keys."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from klformer.attention import AttentionSpec, attention_capabilities, attention_options
from klformer.checks import check_choice, check_count, check_number
from klformer.conversion import saving
from klformer.conversion.batches import Batches
from klformer.conversion.certify import ALONE, Certificate, LayerErrors, alone, figures
from klformer.conversion.clock import Clock
from klformer.conversion.distil import Trained, distil
from klformer.conversion.fit import HeadErrors, Loss, Progress
from klformer.conversion.hosts import Batch, ConversionError, Extension, Host, Site, chosen_sites, evaluating
from klformer.conversion.labels import asked_about
from klformer.conversion.learn import Learned, learn_kernels
from klformer.conversion.own import OwnHost
from klformer.conversion.prune import START_PER_DIM
from klformer.conversion.record import SiteRecord
from klformer.conversion.resume import Store
from klformer.conversion.start import atoms_of
from klformer.errors import ArgumentError, ArgumentTypeError

#: Kernels learn so many times faster than other weights in fine-tuning.
KERNEL_RATE_FACTOR = 10.0
#: Number of frequencies that stands for as few as an error budget allows.
AUTO = "auto"
#: Keys on each side of a query that a converted layer sees exactly, unless another window is asked for.
WINDOW = 8
#: Kernels that learn nothing: what they are is seen without a window.
FIXED = ("performer", "linear-elu")


@dataclass(frozen=True)
class Conversion:
    """A converted model and what it kept, as `convert` returns it.

    Examples:
        >>> import torch, klformer
        >>> config = klformer.EncoderConfig(model_dim=16, num_layers=1, num_heads=2, attention="softmax")
        >>> teacher = klformer.TransformerEncoder(config)
        >>> batches = [{"x": torch.randn(2, 12, 16)} for _ in range(10)]
        >>> conversion = klformer.convert(teacher, batches, options={"num_frequencies": 8}, steps=2)
        >>> sorted(conversion.certificate.linear)
        ['cosine_first', 'cosine_mean', 'distance']
        >>> conversion.save("linear")
    """

    model: nn.Module
    certificate: Certificate
    records: Mapping[str, SiteRecord]
    """The attentions that are in the model now, by the names of their sites."""

    def save(self, folder: str | Path, *, tokenizer: Any = None) -> None:
        """Write the model and its certificate; `load_converted` gives the same model back, bit for bit.

        A model of transformers becomes one of its folders. Of a model of klformer the weights and the attentions are
        written.

        Args:
            folder: Made if it is not there. Files of the same names are replaced.
            tokenizer: Written as well, for a model of transformers.

        Raises:
            ArgumentError: there is a tokenizer, and the model is klformer's.
            FileError: something can't be written.
        """
        saving.save(self.model, self.records, self.certificate, Path(folder), tokenizer=tokenizer)


def convert(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    attention: str | AttentionSpec = "atoms-prf",
    options: Mapping[str, Any] | None = None,
    layers: tuple[int, ...] | None = None,
    steps: int = 300,
    learning_rate: float = 0.05,
    loss: Loss = "output",
    error_budget: float = 0.1,
    finetune_steps: int = 0,
    finetune: Trained = "all",
    finetune_learning_rate: float = 1e-4,
    label_weight: float = 0.0,
    keep_softmax: int | float = 0,
    max_positions: int | None = None,
    extension: Extension = "repeat",
    evaluation: Iterable[Batch] | None = None,
    choosing: Iterable[Batch] | None = None,
    state_file: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Conversion:
    """Replace the softmax attention of a trained model by a kernel that is learned from the model's queries and keys.

    The model that is given is left as it is.

    Args:
        model: A model of transformers that calls its attention interface, or one of klformer's layers with softmax.
        batches: What the model is called with, as mappings from names to tensors, labels included if there are any.
            One of ten, eight at most, is held out to measure by, and as many to choose by: when to stop, what was best,
            how many atoms are enough, which layers stay softmax. The certificate is of the former alone.
        attention: The attention to put in, with options as text if you like.
        options: Options of the attention; `klformer.attention_options(name)` lists them. A kernel that is
            learned and positive sees 8 keys on each side of a query exactly besides; `window` says how many, 0 for the
            kernel alone, and the certificate has both parts alone, too. Random frequencies are drawn once and kept,
            unless you say `redraw=True`: then every step learns with another draw. With `num_frequencies="auto"` every
            layer gets as few atoms as keep its error within `error_budget`, 4 D at most.
        layers: Which layers, counted from 0 in the order in which they run; None for all.
        steps: Steps of fitting, a batch each; it ends earlier if nothing is gained any more.
        learning_rate: Of the kernels, when they are fitted.
        loss: What is fitted: the "output" of attention, or its "weights" by their cross-entropy, which takes time and
            memory quadratic in the length.
        error_budget: The largest error of a layer for `num_frequencies="auto"`; otherwise it does nothing.
        finetune_steps: Steps of distillation of the teacher's answers after that.
        finetune: What they train: "all" weights, or the "kernels" alone.
        finetune_learning_rate: Of all weights but the kernels', which take ten times as much.
        label_weight: What the task's own loss, the cross-entropy of the labels, weighs in fine-tuning beside the
            teacher's answers.
        keep_softmax: How many layers stay softmax, those with the largest errors; or, below 1, the error above which a
            layer stays softmax. Figures without them are in the certificate as well.
        max_positions: Tokens that the converted model is to read, more than the teacher: its learned position
            embeddings are extended. Batches may be as long; the teacher that they are compared with is extended, too.
        extension: How: the same rows again ("repeat"), or drawn out ("interpolate").
        evaluation: Batches to measure by, in place of some of `batches`.
        choosing: Batches to choose by, in place of some of `batches`.
        state_file: Where the state of fitting is saved now and then. What is there is gone on with, if the arguments
            are the same; when all is done, the file is removed.
        seed: Of everything that is random.
        progress: Called with what is done, the step, the number of steps, and the error.

    Raises:
        ConversionError: the model can't be converted; nothing was done then.
        ArgumentError: an argument is not allowed.

    Examples:
        >>> import torch, klformer
        >>> config = klformer.EncoderConfig(model_dim=16, num_layers=1, num_heads=2, attention="softmax")
        >>> teacher = klformer.TransformerEncoder(config)
        >>> batches = [{"x": torch.randn(2, 12, 16)} for _ in range(10)]
        >>> conversion = klformer.convert(teacher, batches, options={"num_frequencies": 8}, steps=2)
        >>> conversion.certificate.layers[0].attention
        'atoms-prf:near_gain=0.0,num_frequencies=8,window=8'

        With a model of transformers:

        >>> import transformers  # doctest: +SKIP
        >>> model = transformers.AutoModelForMaskedLM.from_pretrained("bert-base-uncased")  # doctest: +SKIP
        >>> conversion = klformer.convert(model, batches)  # doctest: +SKIP
        >>> conversion.save("bert-linear")  # doctest: +SKIP
    """
    spec = _spec(attention, options)
    check_count("steps", steps, minimum=0)
    check_count("finetune_steps", finetune_steps, minimum=0)
    check_number("learning_rate", learning_rate, exclusive=True)
    check_number("finetune_learning_rate", finetune_learning_rate, exclusive=True)
    check_number("keep_softmax", keep_softmax)
    if keep_softmax > 1 and keep_softmax != int(keep_softmax):
        raise ArgumentError(f"keep_softmax must be a number of layers, or an error below 1, got {keep_softmax!r}")
    check_number("label_weight", label_weight)
    check_number("error_budget", error_budget, exclusive=True)
    check_choice("loss", loss, ("output", "weights"))
    check_choice("finetune", finetune, ("kernels", "all"))
    check_choice("extension", extension, ("repeat", "interpolate"))
    is_auto = spec.options.get("num_frequencies") == AUTO
    if is_auto and not _has_atoms(spec):
        raise ArgumentError(
            f"num_frequencies={AUTO!r} needs an attention whose atoms can be dropped one by one, which is 'atoms-prf' "
            f"with envelope 'simplex'; for {spec.label()!r} give a number"
        )
    clock = Clock()
    teacher = host_of(model)
    if max_positions is not None:
        check_count("max_positions", max_positions)
        teacher = host_of(copy.deepcopy(model))
        teacher.extend_positions(max_positions, extension)
    data = Batches(batches, evaluation, choosing, steps=steps + finetune_steps, seed=seed)
    with evaluating(teacher.model):
        sites = teacher.sites(data.held_out[0])
        chosen = chosen_sites(sites, layers)
        _check_attention(spec, chosen)
        if label_weight:
            _check_labels(teacher, data.held_out[0], causal=chosen[0].causal)
        records = {site.name: _record(spec, site, is_auto=is_auto) for site in chosen}
        student = host_of(copy.deepcopy(teacher.model))
        store = resumed = None
        if state_file is not None:
            settings = {"attention": spec.complete().label(), "layers": [site.name for site in chosen], "steps": steps}
            settings |= {"learning_rate": learning_rate, "loss": loss, "seed": seed, "batches": data.fingerprint()}
            settings |= {"finetune_steps": finetune_steps, "finetune": finetune, "keep_softmax": keep_softmax}
            settings |= {"finetune_learning_rate": finetune_learning_rate, "error_budget": error_budget}
            settings |= {"label_weight": label_weight}
            store = Store(Path(state_file), settings)
            resumed = store.load()
        before = resumed.rest if resumed is not None and resumed.stage == "distil" else None
        if before is not None:
            learned = Learned.from_json(before["learned"], next(model.parameters()).device)
        else:
            learned = learn_kernels(
                student,
                records,
                data,
                steps=steps,
                learning_rate=learning_rate,
                loss=loss,
                error_budget=error_budget if is_auto else None,
                seed=seed,
                progress=progress,
                store=store,
            )
        clock.lap("fit")
        student.install(learned.mechanisms)
        measured = partial(figures, teacher=teacher, batches=data.held_out, causal=chosen[0].causal)
        kept = _stay_softmax(learned.chosen_by, keep_softmax)
        linear: dict[str, float] = {}
        if before is not None:
            linear = before["linear"]
        elif kept or not finetune_steps:
            linear = measured(student)
        student.remove(kept)
        trained = {name: mechanism for name, mechanism in learned.mechanisms.items() if name not in kept}
        if finetune_steps:
            distil(
                student,
                teacher,
                trained,
                data,
                steps=finetune_steps,
                learning_rate=finetune_learning_rate,
                kernel_learning_rate=finetune_learning_rate * KERNEL_RATE_FACTOR,
                trained=finetune,
                label_weight=label_weight,
                causal=chosen[0].causal,
                first_step=steps,
                seed=seed,
                progress=progress,
                store=store,
                before={"learned": learned.for_json(), "linear": linear},
            )
            clock.lap("finetune")
        present = measured(student) if kept or finetune_steps else linear
        parts: dict[str, dict[str, float]] = {}
        if spec.options.get("window"):
            for part in ALONE:
                with alone(trained.values(), part):
                    parts[part] = measured(student)
        certificate = Certificate(
            model=type(model).__name__,
            layers=_layer_errors(sites, spec, learned, kept),
            teacher=measured(teacher),
            linear=linear if kept else present,
            hybrid=present if kept else None,
            num_held_out=len(data.held_out),
            seconds=clock.laps,
            processor_seconds=clock.processor_seconds(),
            notes=_notes(sites, chosen, kept, finetune_steps, is_resumed=resumed is not None),
            parts=parts,
        )
    if store is not None:
        store.forget()
    records = {name: learned.records[name] for name in trained}
    student.finish(records)
    return Conversion(student.model.eval(), certificate, records)


def host_of(model: nn.Module) -> Host:
    """The ways to the attention of a model.

    Raises:
        ConversionError: there are none.
        ArgumentTypeError: it is not a model.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch module, got {type(model).__name__}")
    if saving.is_of_transformers(model):
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
    return spec if chosen.get("window") else _without_window(spec)


def _without_window(spec: AttentionSpec) -> AttentionSpec:
    options = {key: value for key, value in spec.options.items() if key not in ("window", "near_gain")}
    return AttentionSpec(name=spec.name, options=options)


def _has_atoms(spec: AttentionSpec) -> bool:
    small = AttentionSpec(name=spec.name, options={**spec.options, "num_frequencies": 2})
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


def _record(spec: AttentionSpec, site: Site, *, is_auto: bool) -> SiteRecord:
    sizes, spec = site.sizes, _without_window(spec) if site.cross else spec
    options = {**spec.options, "num_frequencies": START_PER_DIM * sizes.head_dim} if is_auto else spec.options
    return SiteRecord(
        attention=AttentionSpec(name=spec.name, options=options).complete(),
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        value_dim=sizes.head_dim if sizes.value_dim is None else sizes.value_dim,
    )


def _stay_softmax(errors: HeadErrors, keep: int | float) -> set[str]:
    """The names of the sites that stay softmax: the worst so many, or those with an error above a budget below 1."""
    means = {name: float(error.mean()) for name, error in errors.by_site.items()}
    if isinstance(keep, float) and 0 < keep < 1:
        return {name for name, error in means.items() if error > keep}
    return set(sorted(means, key=means.__getitem__, reverse=True)[: int(keep)])


def _layer_errors(sites: list[Site], spec: AttentionSpec, learned: Learned, kept: set[str]) -> tuple[LayerErrors, ...]:
    return tuple(
        LayerErrors(
            layer=index,
            name=site.name,
            attention=(_without_window(spec) if site.cross else spec).label(),
            num_frequencies=learned.records[site.name].num_frequencies,
            start=tuple(learned.at_start.by_site[site.name].tolist()),
            fitted=tuple(learned.fitted.by_site[site.name].tolist()),
            stays_softmax=site.name in kept,
        )
        for index, site in enumerate(sites)
        if site.name in learned.records
    )


def _notes(
    sites: list[Site], chosen: list[Site], kept: set[str], finetune_steps: int, *, is_resumed: bool
) -> tuple[str, ...]:
    notes = []
    if is_resumed:
        notes.append("it was interrupted and gone on with: the seconds are those since then")
    if len(chosen) < len(sites):
        notes.append(f"{len(sites) - len(chosen)} of {len(sites)} layers were left out and are what they were")
    if kept:
        notes.append(f"{len(kept)} layers stay softmax: time and memory of the model are quadratic in the length")
        if finetune_steps:
            notes.append("the linear figures are those before fine-tuning, which trained the model with softmax layers")
    return tuple(notes)
