"""`klformer.convert`: a trained softmax model becomes linear, its kernels learned from its own queries and keys.

Three steps, which can be called apart: `plan` says what is replaced by what, `fit` learns it, `certify` measures it.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from klformer.attention import AttentionSpec
from klformer.conversion import saving
from klformer.conversion.certificate import ALONE, Certificate, LayerErrors, alone, figures
from klformer.conversion.config import ConversionConfig
from klformer.conversion.fitting import Progress
from klformer.conversion.hosts import Batch, evaluating
from klformer.conversion.learning import Fitted, fit
from klformer.conversion.planning import Plan, plan, without_window
from klformer.conversion.record import SiteRecord
from klformer.conversion.threads import threads


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
    steps: int | None = None,
    config: ConversionConfig | None = None,
    evaluation: Iterable[Batch] | None = None,
    choosing: Iterable[Batch] | None = None,
    state_file: str | Path | None = None,
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
            kernel alone, "auto" for what measures best in each layer. The certificate has both parts alone, too.
            Random frequencies are drawn once and kept; with `redraw=True` every step learns with another draw. With
            `num_frequencies="auto"` every layer gets as few atoms as keep its error within the config's
            `error_budget`, 4 D at most.
        steps: Steps of fitting, a batch each, in place of those of the config.
        config: Everything else: layers, rates, fine-tuning, layers that stay softmax, longer positions, the seed.
        evaluation: Batches to measure by, in place of some of `batches`.
        choosing: Batches to choose by, in place of some of `batches`.
        state_file: Where the state of fitting is saved now and then. What is there is gone on with, if the arguments
            are the same; when all is done, the file is removed.
        progress: Called after every step with what is done ("fit", "prune", "align", "distil" or "measure"), the step,
            the number of steps, and the latest error; NaN where there is none.

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
    config = config or ConversionConfig()
    if steps is not None:
        config = ConversionConfig(**{**dict(config), "steps": steps})
    data = {"evaluation": evaluation, "choosing": choosing}
    planned = plan(model, batches, attention=attention, options=options, config=config, **data)
    conversion = certify(fit(planned, state_file=state_file, progress=progress), progress)
    if state_file is not None:
        Path(state_file).unlink(missing_ok=True)
    return conversion


def certify(fitted: Fitted, progress: Progress | None = None) -> Conversion:
    """Measure what a model kept, on batches that nothing was learned from or chosen by: the last step of `convert`.

    Args:
        fitted: What `fit` gave.
        progress: As in `convert`.

    Examples:
        >>> import torch, klformer
        >>> config = klformer.EncoderConfig(model_dim=16, num_layers=2, num_heads=2, attention="softmax")
        >>> batches = [{"x": torch.randn(2, 12, 16)} for _ in range(3)]
        >>> plan = klformer.conversion.plan(klformer.TransformerEncoder(config), batches)
        >>> conversion = klformer.conversion.certify(klformer.conversion.fit(plan))
        >>> len(conversion.certificate.layers)
        2
    """
    planned, student, learned, notes = fitted.plan, fitted.student, fitted.learned, _notes(fitted)
    batches, causal = planned.batches.held_out, planned.causal
    measured = partial(figures, teacher=planned.teacher, batches=batches, causal=causal, progress=progress)
    with evaluating(planned.teacher.model), evaluating(student.model), threads(fitted.num_threads):
        present = measured(student)
        parts: dict[str, dict[str, float]] = {}
        if planned.attention.options.get("window"):
            for part in ALONE:
                with alone(fitted.trained.values(), part):
                    parts[part] = measured(student)
        certificate = Certificate(
            model=type(planned.teacher.model).__name__,
            layers=_layer_errors(planned, fitted),
            teacher=measured(planned.teacher),
            linear=fitted.linear or present,
            hybrid=present if fitted.kept else None,
            num_held_out=len(planned.batches.held_out),
            seconds=fitted.seconds,
            processor_seconds=time.process_time() - fitted.processor_began,
            notes=notes,
            parts=parts,
        )
    records = {name: learned.records[name] for name in fitted.trained}
    student.finish(records)
    return Conversion(student.model.eval(), certificate, records)


def _layer_errors(planned: Plan, fitted: Fitted) -> tuple[LayerErrors, ...]:
    learned, spec = fitted.learned, planned.attention
    return tuple(
        LayerErrors(
            layer=index,
            name=site.name,
            attention=_label(spec, learned.records[site.name]),
            num_frequencies=learned.records[site.name].num_frequencies,
            start=tuple(learned.at_start.by_site[site.name].tolist()),
            fitted=tuple(learned.fitted.by_site[site.name].tolist()),
            stays_softmax=site.name in fitted.kept,
        )
        for index, site in enumerate(planned.sites)
        if site.name in learned.records
    )


def _label(spec: AttentionSpec, record: SiteRecord) -> str:
    """An attention as it was asked for, with the window that it got."""
    if not (window := record.attention.options.get("window")):
        return without_window(spec).label()
    return AttentionSpec(name=spec.name, options={**spec.options, "window": window}).label()


def _notes(fitted: Fitted) -> tuple[str, ...]:
    notes, total, kept = [], len(fitted.plan.sites), len(fitted.kept)
    if fitted.is_resumed:
        notes.append("it was interrupted and gone on with: the seconds are those since then")
    if fitted.num_threads < torch.get_num_threads():
        notes.append(f"on one thread: {torch.get_num_threads()} are not faster here")
    if left_out := total - len(fitted.plan.records):
        notes.append(f"{left_out} of {total} layers were left out and are what they were")
    if kept:
        notes.append(f"{kept} layers stay softmax: time and memory of the model are quadratic in the length")
        if fitted.plan.config.align_steps + fitted.plan.config.finetune_steps:
            notes.append("the linear figures are those before the stages that trained the model with softmax layers")
    return tuple(notes)
