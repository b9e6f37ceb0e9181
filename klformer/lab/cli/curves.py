"""`klformer curves`: the metric of runs on the validation set against steps; seeds are one line and a band."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib import pyplot as plt
from matplotlib.backend_bases import FigureCanvasBase

from klformer.errors import ArgumentError, RunError, UserError
from klformer.lab.cli.command import plain_command
from klformer.lab.plotting import line_style, save
from klformer.lab.report.figures import draw_mean, frozen_style
from klformer.lab.report.run import Run, read_run
from klformer.lab.runs.find import find_runs
from klformer.lab.runs.folder import RunFolder


def draw_curves(
    folders: Sequence[Path], target: Path, *, title: str | None = None, say: Callable[[str], None] = print
) -> None:
    """Write a figure; the format is that of the target's ending.

    Runs that differ in nothing but their seed are one line, their mean, in a band from the lowest to the highest. A
    frozen kernel has the colour of the learned one, and is dashed.

    Args:
        folders: Runs, or folders of runs.
        say: Takes notes of what was left out.

    Raises:
        RunError: there is no run, none has anything to show yet, or their metrics differ; or some are damaged, which is
            said when the others are drawn.
        ValueError: there is no folder, or the target's ending is no format of figures.
    """
    if not folders:
        raise ArgumentError("give at least one run: klformer curves runs/*")
    formats = FigureCanvasBase.get_supported_filetypes()
    if target.suffix[1:] not in formats:
        raise ArgumentError(f"{target} must end in one of {', '.join(formats)}")
    damaged: list[str] = []
    runs = _evaluated_runs(folders, say, damaged)
    label = _common_label(runs)
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    lines = _lines(runs)
    colours = list(dict.fromkeys(_without_frozen(name) for name, _ in lines))
    for name, group in lines:
        style = line_style(colours.index(_without_frozen(name))) | {"marker": "o"} | frozen_style(name)
        seed = group[0].seed
        seeds = f", {len(group)} seeds" if len(group) > 1 else f", seed {seed}" if seed else ""
        draw_mean(axes, [dict(run.curve) for run in group], name + seeds, style)
    axes.set_xlabel("training step")
    axes.set_ylabel(f"validation {label}")
    axes.grid(alpha=0.3)
    if title is not None:
        axes.set_title(title)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save(figure, target)
    if damaged:
        raise RunError(f"{target} is written without runs that are damaged: {'; '.join(damaged)}")


def _evaluated_runs(folders: Sequence[Path], say: Callable[[str], None], damaged: list[str]) -> list[Run]:
    """Return the runs in these folders that have something to show, each once; what is wrong with others goes to
    `damaged`."""
    found: dict[Path, Path] = {}
    left_out = []
    for folder in folders:
        below = find_runs(folder)
        if not below:
            left_out.append(f"{folder} is not a run and holds none: there is no {RunFolder.CONFIG}")
        for path in below:
            found.setdefault(path.resolve(), path)
    runs = []
    for path in found.values():
        try:
            run = read_run(path)
        except UserError as error:
            damaged.append(str(error))
            continue
        if run.curve:
            runs.append(run)
        else:
            left_out.append(f"{path} has not been evaluated yet")
    if not runs:
        raise RunError("; ".join([*left_out, *damaged]))
    for note in left_out:
        say(f"note: {note}; left out")
    return runs


def _lines(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Return the runs of each line, and its name: the attention, and the first run where there are other
    differences."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.config.items() if key != "seed"}
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    names = Counter(group[0].attention for group in groups.values())
    return [
        (group[0].attention + (f" ({group[0].title})" if names[group[0].attention] > 1 else ""), group)
        for group in groups.values()
    ]


def _without_frozen(name: str) -> str:
    """Return what a frozen kernel and its learned self have in common."""
    return name.replace(",frozen=true", "").replace("frozen=true,", "").replace(":frozen=true", "")


def _common_label(runs: Sequence[Run]) -> str:
    """Return what all runs were evaluated by, with its unit."""
    examples = {run.task.metric: run for run in reversed(runs)}
    if len(examples) > 1:
        metrics = " and ".join(f"{metric.name} ({run.name})" for metric, run in examples.items())
        raise RunError(f"runs of different metrics have no axis in common: {metrics}; draw them one by one")
    return runs[0].task.metric.label


@dataclass(frozen=True)
class Curves:
    """Draw the metric of runs on the validation set against steps.

    Example: klformer curves runs/sparsity0.5-* --out curves.svg
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Runs, or folders of runs."""
    out: Path = Path("curves.svg")
    """File to write: svg, png or pdf."""
    title: str | None = None
    """Title of the figure."""


def draw_figure(options: Curves) -> None:
    """Draw, and say where the figure is."""
    draw_curves(options.runs, options.out, title=options.title)
    print(f"written to {options.out}")


COMMAND = plain_command(Curves, draw_figure)
