"""`klformer analyze eigenvalues`: what became of the covariance of the frequencies (the paper's eigenvalue tables)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from klformer.errors import ArgumentError
from klformer.kernels import GaussianMixtureSpectrum, SpectralDistribution
from klformer.lab.analysis.output import Count, RunsAnalysis, print_table, write_results
from klformer.lab.analysis.seeds import over_seeds
from klformer.lab.plotting import COLOURS, LEARNED, WIDE
from klformer.lab.runs.load import LoadedRun, RunReader
from klformer.lab.runs.naming import attention_label, task_label
from klformer.lab.terminal import make_console
from klformer.lab.training.progress import make_reporter
from klformer.noise import kept_noise


@dataclass(frozen=True)
class HeadSpectrum:
    """Eigenvalues of the covariance of one head, ascending."""

    layer: int
    head: int
    eigenvalues: Tensor  # (D,), or (C D,) of all components of a mixture that is not tied


def spectra_of(model: nn.Module) -> Iterator[SpectralDistribution]:
    """Yield the distributions of a model, from the first layer to the last."""
    for module in model.modules():
        if isinstance(module, SpectralDistribution):
            yield module


@torch.no_grad()
def covariance(spectrum: SpectralDistribution, *, draws: int = 64, generator: torch.Generator | None = None) -> Tensor:
    """Return the covariance of the frequencies, (H or 1, C, D, D).

    A Gaussian mixture has one for every component in closed form (tied components are listed once). Of any other
    distribution it is estimated from the frequencies of so many draws; its noise is put back afterwards.
    """
    if isinstance(spectrum, GaussianMixtureSpectrum):
        return spectrum.covariance().double()
    samples = []
    with kept_noise(spectrum):
        for _ in range(draws):
            spectrum.resample(generator)
            samples.append(spectrum.frequencies().double())
    omega = torch.cat(samples, dim=1)  # (H or 1, draws R, D)
    centred = omega - omega.mean(1, keepdim=True)
    return (centred.transpose(1, 2) @ centred / (omega.shape[1] - 1)).unsqueeze(1)


def eigenvalues(model: nn.Module, *, draws: int = 64, seed: int = 0) -> list[HeadSpectrum]:
    """Return eigenvalues by layer and head, both counted from 1 as in the paper."""
    found = []
    for layer, spectrum in enumerate(spectra_of(model), start=1):
        generator = torch.Generator().manual_seed(seed)
        values = torch.linalg.eigvalsh(covariance(spectrum, draws=draws, generator=generator))
        for head, of_head in enumerate(values.flatten(1), start=1):
            found.append(HeadSpectrum(layer, head, of_head.clamp(min=0).sort().values))
    return found


CAPTION = (
    "Eigenvalues of the covariance of the frequencies, by layer and head, after training and at initialisation. "
    "Gaussian mixtures in closed form, other distributions from {draws} draws."
)
SUMMARY_CAPTION = "Mean over heads and seeds of the mean eigenvalue (points), and of the smallest and largest (lines)."
DRAWS = Count("draws", full=64, quick=8)
#: By what a panel shows, attention and task: the heads of each of its seeds, before and after training.
Spectra = dict[str, list[tuple[list[HeadSpectrum], list[HeadSpectrum]]]]


@dataclass(frozen=True, kw_only=True)
class EigenvalueAnalysis(RunsAnalysis):
    """Smallest, largest and mean eigenvalue by layer and head, beside those at initialisation.

    A control whose kernel was frozen is just one more run. Of several learning
    rates, that is taken which is best on validation at the first seed that has several. Example:

      klformer analyze eigenvalues runs/text-laptop-gmm-prf-seed0 runs/text-laptop-gmm-prf-frozen=True-seed0
    """

    counts: ClassVar[tuple[Count[Any], ...]] = (DRAWS,)

    draws: int | None = None
    """Draws for distributions without a closed form; 64, or 8 with --quick."""


def run(options: EigenvalueAnalysis) -> None:
    """Compute, print and write the eigenvalues."""
    draws = options.choose(DRAWS)
    console, reporter = make_console(150), make_reporter(quiet=False)
    rows: list[dict[str, Any]] = []
    spectra: Spectra = {}
    reader = RunReader(reporter)
    for loaded in reader.read(options.runs):
        folder = loaded.folder
        if not any(True for _ in spectra_of(loaded.model)):
            reporter.say(f"{folder}: {loaded.config.attention.name} has no frequencies; left out")
            continue
        before, after = spectra_before_and_after(loaded, draws=draws)
        attention, task = attention_label(loaded.config), task_label(loaded.config)
        spectra.setdefault(f"{attention}, {task}", []).append((before, after))
        known = {"run": folder.name, "attention": attention, "task": task, "seed": loaded.config.seed}
        for initial, trained in zip(before, after, strict=True):
            rows.append(
                {**known, "layer": trained.layer, "head": trained.head}
                | _summary(trained, "")
                | _summary(initial, "initial_")
            )
    if not rows:
        reader.finish()
        raise ArgumentError("none of the runs has frequencies")
    print_table(console, rows, "eigenvalues of the covariance")
    caption = CAPTION.format(draws=draws)
    figure = draw_spectra(spectra)
    settings = {"draws": draws}
    write_results(options.out, "eigenvalues", caption=caption, rows=rows, settings=settings, figure=figure)
    figure = draw_summary(rows)
    write_results(
        options.out, "eigenvalues-summary", caption=SUMMARY_CAPTION, rows=rows, settings=settings, figure=figure
    )
    console.print(f"written to {options.out}", highlight=False)
    reader.finish()


def spectra_before_and_after(loaded: LoadedRun, *, draws: int) -> tuple[list[HeadSpectrum], list[HeadSpectrum]]:
    """Return eigenvalues at initialisation, which is stored with the run, and of the best checkpoint."""
    return tuple(eigenvalues(model, draws=draws) for model in (loaded.at_start(), loaded.model))  # type: ignore[return-value]


def _summary(spectrum: HeadSpectrum, prefix: str) -> dict[str, float]:
    values = spectrum.eigenvalues
    return {
        f"{prefix}minimum": values.min().item(),
        f"{prefix}maximum": values.max().item(),
        f"{prefix}mean": values.mean().item(),
    }


def draw_spectra(spectra: Spectra) -> Figure:
    """Draw sorted eigenvalues, a panel for all seeds of an attention, a line a head; grey at initialisation, coloured
    by layer afterwards."""
    columns = min(3, len(spectra))
    count = -(-len(spectra) // columns)
    figure, all_axes = plt.subplots(
        count, columns, figsize=(4 * columns, 3 * count + 0.8), layout="constrained", squeeze=False
    )
    for axes, (name, seeds) in zip(all_axes.flat, spectra.items(), strict=False):
        for before, after in seeds:
            for spectrum in before:
                look = {"color": "#999999", "linewidth": 1, "linestyle": "--", "label": "at initialisation"}
                _draw_line(axes, spectrum, look)
            for spectrum in after:
                colour = COLOURS[(spectrum.layer - 1) % len(COLOURS)]
                _draw_line(axes, spectrum, {"color": colour, "linewidth": 1.2, "label": f"layer {spectrum.layer}"})
        axes.set_yscale("log")
        heads = [spectrum.eigenvalues for before_and_after in seeds for part in before_and_after for spectrum in part]
        smallest = torch.stack([values.clamp(min=1e-9).min() for values in heads]).min()
        axes.set_ylim(bottom=max(1e-6, 0.5 * smallest.item()))
        axes.set_title(name)
        axes.set_xlabel("rank")
        axes.grid(alpha=0.3)
        # One name for all lines of a kind.
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        axes.legend(once.values(), once.keys())
    for axes in all_axes.flat[len(spectra) :]:
        axes.set_visible(False)
    for axes in all_axes[:, 0]:
        axes.set_ylabel("eigenvalue")
    return figure


def _draw_line(axes: Axes, spectrum: HeadSpectrum, look: dict[str, Any]) -> None:
    axes.plot(range(1, len(spectrum.eigenvalues) + 1), spectrum.eigenvalues.flip(0), **look)


def draw_summary(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the mean eigenvalue of every attention between the smallest and the largest, before and after training, a
    panel a task. What did not move at all, such as frozen kernels, is left out beside others."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = ("minimum", "mean", "maximum")
    values = [f"{prefix}{name}" for prefix in ("", "initial_") for name in names]
    moved = [row for row in rows if any(row[name] != row[f"initial_{name}"] for name in names)]
    rows = [row for row in rows if row["attention"] in {row["attention"] for row in moved or rows}]
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    size = (min(WIDE, 1.6 + 3.2 * len(tasks)), 1.7 + 0.42 * len(attentions))
    figure, panels = plt.subplots(1, len(tasks), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, task in zip(panels.flat, tasks, strict=True):
        of_task = over_seeds([row for row in rows if row["task"] == task], by=["attention"], values=values)
        for prefix, shift, colour, label in (("initial_", -0.15, "#999999", "before"), ("", 0.15, LEARNED, "after")):
            low, middle, high = ([max(row[f"{prefix}{name}"], 1e-6) for row in of_task] for name in names)
            places = [attentions.index(row["attention"]) + shift for row in of_task]
            axes.hlines(places, low, high, color=colour, linewidth=2)
            axes.plot(middle, places, "o", color=colour, label=f"{label} training")
        axes.set_xscale("log")
        axes.set_title(task)
        axes.set_xlabel("eigenvalue")
        axes.grid(axis="x", alpha=0.3)
    panels[0, 0].set_yticks(range(len(attentions)), attentions)
    panels[0, 0].invert_yaxis()
    title = "Line: from the smallest to the largest eigenvalue. Dot: their mean."
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, title=title)
    return figure
