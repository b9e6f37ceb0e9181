"""`klformer analyze kernel`: what was learned, as pictures."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from klformer.attention.kernelized import KernelizedAttention
from klformer.errors import ArgumentError
from klformer.lab.analysis.kernel.figures import INITIAL, TRAINED, draw_attention, draw_profiles, head_panels
from klformer.lab.analysis.kernel.measure import (
    attention_of_first_token,
    kernel_profile,
    main_directions,
    sample_frequencies,
)
from klformer.lab.analysis.kernel.planted_results import compare_moments, compare_with_planted
from klformer.lab.analysis.output import AnalysisOptions, Count, write_results
from klformer.lab.data import Batch, collate
from klformer.lab.runs.load import LoadedRun, load_run
from klformer.lab.tasks import Planted
from klformer.lab.training.progress import make_reporter
from klformer.models import SequenceClassifier

PROFILE_CAPTION = (
    "The kernel of every head as the key moves away from the query by delta along the direction in which the learned "
    "frequencies vary most (query a unit vector, 1 at delta = 0, smoothing included). Band: deviation of one draw."
)
DENSITY_CAPTION = (
    "Frequencies of every head, before and after training, on the two directions in which the learned ones vary most."
)
ATTENTION_CAPTION = (
    "Where CLS attends in validation example {example}: weights over the positions, mean of {draws} draws."
)
DRAWS = Count("draws", full=50, quick=5)


@dataclass(frozen=True, kw_only=True)
class KernelAnalysis(AnalysisOptions):
    """Shape of the learned kernels, density of their frequencies, and where attention goes.

    Example: klformer analyze kernel runs/sparsity0.5-laptop-gmm-rks-seed0
    """

    counts: ClassVar[tuple[Count[Any], ...]] = (DRAWS,)

    run: tyro.conf.Positional[Path]
    """Folder of a run."""
    example: int = 0
    """Example of the validation set whose attention is drawn."""
    draws: int | None = None
    """Draws of the frequencies that are averaged over; 50, or 5 with --quick."""
    data_root: Path | None = None
    """Where the data is, if not where it was in training."""


def run(options: KernelAnalysis) -> None:
    """Draw and write the three figures with their numbers."""
    draws = options.choose(DRAWS)
    loaded = load_run(options.run, make_reporter(quiet=False), data_root=options.data_root)
    before, after = _kernels(loaded.at_start()), _kernels(loaded.model)
    if not after:
        raise ArgumentError(f"{loaded.config.attention.name} has no frequencies to look at")
    if isinstance(loaded.task, Planted):
        compare_with_planted(loaded, loaded.task, before[0], after[0], folder=options.out, draws=draws)
        compare_moments(loaded, loaded.task, before[0], folder=options.out, draws=draws)
        return
    # Only a classifier of single sequences has one position whose attention decides.
    batch = _batch_of_one(loaded, options.example) if isinstance(loaded.model, SequenceClassifier) else None
    settings: dict[str, Any] = {"run": options.run.name, "draws": draws, "example": options.example}
    console = Console()
    with Progress(transient=True, console=console) as progress:
        bar = progress.add_task("kernels", total=2 if batch is None else 3)
        rows = _profiles(before, after, draws)
        figure = draw_profiles(rows)
        write_results(
            options.out, "kernel-profiles", caption=PROFILE_CAPTION, rows=rows, settings=settings, figure=figure
        )
        progress.advance(bar)
        rows, figure = _densities(before, after, draws)
        write_results(
            options.out, "kernel-frequencies", caption=DENSITY_CAPTION, rows=rows, settings=settings, figure=figure
        )
        progress.advance(bar)
        written = ["kernel-profiles", "kernel-frequencies"]
        if batch is not None and isinstance(loaded.model, SequenceClassifier):
            rows = _attention(loaded.model, batch, draws)
            figure = draw_attention(rows)
            caption = ATTENTION_CAPTION.format(example=options.example, draws=draws)
            write_results(options.out, "kernel-attention", caption=caption, rows=rows, settings=settings, figure=figure)
            written.append("kernel-attention")
            progress.advance(bar)
    console.print(f"{', '.join(written)} written to {options.out}", highlight=False)


def _kernels(model: torch.nn.Module) -> list[KernelizedAttention]:
    """Return the attentions with frequencies, from the first layer to the last."""
    found = (module for module in model.modules() if isinstance(module, KernelizedAttention))
    return [attention.double() for attention in found if attention.kernel.spectrum is not None]


Pairs = list[KernelizedAttention]


def _profiles(before: Pairs, after: Pairs, draws: int) -> list[dict[str, Any]]:
    """Return the kernel of every head before and after training, one row a distance from key to query."""
    delta = torch.linspace(-3, 3, 61, dtype=torch.float64)
    rows = []
    for layer, (initial, trained) in enumerate(zip(before, after, strict=True)):
        assert trained.kernel.spectrum is not None
        direction = main_directions(trained.kernel.spectrum, 1, draws=draws, seed=0)[:, 0]
        drawn = [kernel_profile(attention, direction, delta, draws=draws, seed=1) for attention in (initial, trained)]
        for head in range(trained.num_heads):
            for index, position in enumerate(delta.tolist()):
                row: dict[str, Any] = {"layer": layer + 1, "head": head + 1, "delta": position}
                for name, profile in zip(("initial", "trained"), drawn, strict=True):
                    row[name] = profile.mean[head, index].item()
                    row[f"{name}_deviation"] = profile.deviation[head, index].item()
                rows.append(row)
    return rows


def _densities(before: Pairs, after: Pairs, draws: int) -> tuple[list[dict[str, Any]], Figure]:
    figure, all_axes = head_panels(len(after), after[0].num_heads, square=True)
    rows = []
    for layer, (initial, trained) in enumerate(zip(before, after, strict=True)):
        first, second = initial.kernel.spectrum, trained.kernel.spectrum
        assert first is not None
        assert second is not None
        directions = main_directions(second, 2, draws=draws, seed=0)
        samples = [sample_frequencies(spectrum, draws=max(1, draws // 5), seed=1) for spectrum in (first, second)]
        for head in range(trained.num_heads):
            axes = all_axes[layer, head]
            row: dict[str, Any] = {"layer": layer + 1, "head": head + 1}
            for sample, colour, label in zip(samples, (INITIAL, TRAINED), ("initial", "trained"), strict=True):
                points = sample[head] @ directions[head].T
                axes.scatter(points[:, 0], points[:, 1], s=4, color=colour, alpha=0.4, label=label, linewidths=0)
                for axis in (0, 1):
                    row[f"{label}_deviation_{axis + 1}"] = points[:, axis].std().item()
            rows.append(row)
    all_axes[0, -1].legend(fontsize=9, markerscale=4, loc="upper left", bbox_to_anchor=(1, 1))
    return rows, figure


def _batch_of_one(loaded: LoadedRun, example: int) -> Batch:
    """Return an example of the validation set."""
    examples = loaded.examples("validation")
    if not 0 <= example < len(examples):
        raise ArgumentError(f"example must be at least 0 and below {len(examples)}, got {example}")
    return collate(examples, np.array([example]))


def _attention(model: SequenceClassifier, batch: Batch, draws: int) -> list[dict[str, Any]]:
    """Return where the first token attends, one row a head and position."""
    model = model.double()
    if batch.inputs.is_floating_point():
        batch = replace(batch, inputs=batch.inputs.double())
    by_layer = attention_of_first_token(model, lambda: model(*batch.arguments()), draws=draws, seed=2)
    heads = by_layer[0].shape[0]
    weights = torch.cat(by_layer).numpy()
    return [
        {"layer": row // heads + 1, "head": row % heads + 1, "position": position, "weight": float(weight)}
        for row, of_head in enumerate(weights)
        for position, weight in enumerate(of_head)
    ]
