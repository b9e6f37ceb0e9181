"""`klformer curves`: the metric of several runs on the validation set against steps, as a figure."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.backend_bases import FigureCanvasBase

from klformer.errors import ArgumentError, RunError, UserError
from klformer.plotting import line_style, save
from klformer.report.run import Run, read_run
from klformer.runs.find import find_runs
from klformer.runs.folder import RunFolder


def draw_curves(
    folders: Sequence[Path], target: Path, *, title: str | None = None, say: Callable[[str], None] = print
) -> None:
    """Write a figure with one line a run; the format is that of the target's ending.

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
    for number, run in enumerate(runs):
        axes.plot(
            *zip(*run.curve, strict=True),
            marker="o",
            markersize=3,
            label=run.attention + (f", seed {run.seed}" if run.seed else ""),
            **line_style(number),
        )
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
    """The runs in these folders that have something to show, each once; what is wrong with others goes to `damaged`."""
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


def _common_label(runs: Sequence[Run]) -> str:
    """What all runs were evaluated by, with its unit."""
    examples = {run.task.metric: run for run in reversed(runs)}
    if len(examples) > 1:
        metrics = " and ".join(f"{metric.name} ({run.name})" for metric, run in examples.items())
        raise RunError(f"runs of different metrics have no axis in common: {metrics}; draw them one by one")
    return runs[0].task.metric.label
