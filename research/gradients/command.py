"""`analyze gradients`: gradients at the classifier on the way to the solution, and learning curves."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.progress import Progress

from klformer.errors import ArgumentError, RunError
from klformer.lab.analysis.output import Count, RunsAnalysis, check_classification, print_table, some_of, write_results
from klformer.lab.analysis.seeds import over_seeds
from klformer.lab.data import Batch, collate
from klformer.lab.plotting import COLOURS, MARKERS, STYLES, WIDE
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.load import LoadedRun, RunReader
from klformer.lab.runs.naming import attention_label, task_label
from klformer.lab.terminal import make_console
from klformer.lab.training.callbacks import MILESTONES, milestone
from klformer.lab.training.checkpoint import Checkpoint, put_weights
from klformer.lab.training.progress import Reporter, make_reporter
from klformer.models import SequenceClassifier
from research.gradients.measure import GradientStatistics, classifier_gradients, gradient_statistics

Row = dict[str, Any]

CAPTION = (
    "Above: validation accuracy against steps. Below: deviation of the gradients at the hidden units of the "
    "classifier, when the accuracy first reached 20, 40, 60 and 80%, from {examples} validation examples "
    "under {draws} draws, in both readings of the paper: per pass, one value a draw, the gradient of the mean loss of "
    "all examples; per example, one value a draw and example, pooled."
)
CURVES_CAPTION = "Validation accuracy against steps, in %, run by run."
EXAMPLES = Count("examples", full=50, quick=10)
DRAWS = Count("draws", full=50, quick=5)
#: Panels of the figure, by the columns that they show.
DEVIATIONS = {"per_pass_deviation": "per pass", "per_example_deviation": "per example"}


@dataclass(frozen=True, kw_only=True)
class GradientAnalysis(RunsAnalysis):
    """Mean and deviation of the gradients at the classifier, when accuracy first reached 20, 40, 60 and 80%.

    For runs that kept the weights of these moments (training.keep-milestones, on for the sparsity task). Of several
    learning rates, that is taken which is best on validation at the first seed that has several. Example:

      klformer --plugin research analyze gradients runs/sparsity0.*-laptop-gmm-*-seed0
    """

    counts: ClassVar[tuple[Count[Any], ...]] = (
        EXAMPLES,
        DRAWS,
    )

    examples: int | None = None
    """So many validation examples, at random; 50, or 10 with --quick."""
    draws: int | None = None
    """Draws of the frequencies; 50, or 5 with --quick."""
    data_root: Path | None = None
    """Where the data is, if not where it was in training."""


def run(options: GradientAnalysis) -> None:
    """Compute, print and write the table and the figure."""
    examples = options.choose(EXAMPLES)
    draws = options.choose(DRAWS)
    reporter = make_reporter(quiet=False)
    reader = RunReader(reporter, data_root=options.data_root)
    examined = [_open(loaded, examples, reporter) for loaded in reader.read(options.runs)]
    if not examined:
        reader.finish()
    rows: list[Row] = []
    with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("gradients", total=draws * sum(len(one.reached) for one in examined))
        for one in examined:
            rows += _rows(one, draws, lambda: progress.advance(bar))
    console = make_console(170)
    print_table(console, rows, f"gradients at the classifier, {examples} examples x {draws} draws; -: not reached")
    settings = {"examples": examples, "draws": draws}
    caption = CAPTION.format(examples=examples, draws=draws)
    curves = [row for one in examined for row in _curve(one)]
    figure = draw(rows, curves)
    write_results(options.out, "gradients", caption=caption, rows=rows, settings=settings, figure=figure)
    write_results(options.out, "curves", caption=CURVES_CAPTION, rows=curves, settings={})
    console.print(f"written to {options.out}", highlight=False)
    reader.finish()


@dataclass(frozen=True)
class Examined:
    """A run with what its gradients are computed from."""

    folder: Path
    attention: str
    task: str
    seed: int
    model: SequenceClassifier
    batch: Batch
    #: The checkpoints of the milestones that it has reached.
    reached: Mapping[int, Checkpoint]


def _open(loaded: LoadedRun, examples: int, reporter: Reporter) -> Examined:
    folder = loaded.folder
    if not isinstance(loaded.model, SequenceClassifier):
        raise ArgumentError(f"{folder}: gradients are defined for classifiers of single sequences, not of pairs")
    check_classification(loaded, "gradients")
    if not loaded.config.training.keep_milestones:
        raise RunError(f"{folder} has not kept its weights on the way; train with --training.keep-milestones")
    validation = some_of(loaded.examples("validation"), examples)
    store = loaded.run.checkpoints(reporter.say)
    found = {percent: store.newest(milestone(percent)) for percent in MILESTONES}
    return Examined(
        folder=folder,
        attention=attention_label(loaded.config),
        task=task_label(loaded.config),
        seed=loaded.config.seed,
        model=loaded.model,
        batch=collate(validation, np.arange(len(validation))),
        reached={percent: checkpoint for percent, checkpoint in found.items() if checkpoint is not None},
    )


def _known(examined: Examined) -> Row:
    return {"run": examined.folder.name, "attention": examined.attention, "task": examined.task, "seed": examined.seed}


def _curve(examined: Examined) -> Iterator[Row]:
    for point in RunFolder(examined.folder).metrics("validation"):
        yield _known(examined) | {"step": point["step"], "accuracy": 100 * point["accuracy"]}


def _rows(examined: Examined, draws: int, advance: Callable[[], None]) -> list[Row]:
    """One row a milestone; without numbers if the run has not reached it."""
    missing = dict.fromkeys(["step", "accuracy", *(field.name for field in fields(GradientStatistics))])
    rows = []
    for percent in MILESTONES:
        row: Row = _known(examined) | {"reached": percent} | missing
        if percent in examined.reached:
            row |= _measure(examined, examined.reached[percent], draws, advance)
        rows.append(row)
    return rows


def _measure(examined: Examined, checkpoint: Checkpoint, draws: int, advance: Callable[[], None]) -> Row:
    put_weights(examined.model, checkpoint.weights(), checkpoint.folder)
    gradients = classifier_gradients(examined.model, examined.batch, draws=draws, seed=examined.seed, advance=advance)
    accuracy = float(checkpoint.info["validation_accuracy"])
    return {"step": checkpoint.step, "accuracy": accuracy} | asdict(gradient_statistics(gradients))


def draw(rows: Sequence[Row], curves: Sequence[Row]) -> Figure:
    """Learning curves, thin by seed and thick in the mean, and the deviations at the milestones with the standard error
    over seeds; colours by attention, dashes by task."""
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    tasks = sorted({row["task"] for row in rows})
    figure, panels = plt.subplot_mosaic(
        [["curves", "curves"], [*DEVIATIONS]], figsize=(WIDE, 7.2), layout="constrained"
    )
    top, *others = panels.values()
    lines = list(dict.fromkeys((row["attention"], row["task"]) for row in rows))
    for number, (attention, task) in enumerate(lines):
        shift = 1.6 * (number - (len(lines) - 1) / 2)  # bars stand side by side
        colour = COLOURS[attentions.index(attention) % len(COLOURS)]
        style, marker = (kinds[tasks.index(task) % len(kinds)] for kinds in (STYLES, MARKERS))
        look: dict[str, Any] = {"color": colour, "linestyle": style, "marker": marker, "markersize": 4}
        _draw_curves(top, _of(curves, attention, task), look | {"label": f"{attention}, {task}"})
        milestones = over_seeds(_of(rows, attention, task), by=["reached"], values=list(DEVIATIONS))
        for axes, column in zip(others, DEVIATIONS, strict=True):
            reached = [row for row in milestones if row[column] is not None]
            axes.errorbar(
                [row["reached"] + shift for row in reached],
                [row[column] for row in reached],
                yerr=[row[f"{column}_error"] or 0 for row in reached],
                capsize=3,
                elinewidth=1.2,
                **look,
            )
    top.set_xlabel("training step")
    top.set_ylabel("validation accuracy, %")
    for axes, reading in zip(others, DEVIATIONS.values(), strict=True):
        axes.set_title(f"deviation of the gradients, {reading}")
        axes.set_xlabel("validation accuracy first reached, %")
        axes.set_ylabel("times 1,000, log axis")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{1000 * value:.3g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xticks(MILESTONES)
    for axes in (top, *others):
        axes.grid(alpha=0.3)
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=min(3, len(tasks)))
    return figure


def _of(rows: Sequence[Row], attention: str, task: str) -> list[Row]:
    return [row for row in rows if (row["attention"], row["task"]) == (attention, task)]


def _draw_curves(axes: Axes, curves: Sequence[Row], look: Mapping[str, Any]) -> None:
    """The mean over runs, and every one of several."""
    by_run: dict[str, list[Row]] = {}
    for point in curves:
        by_run.setdefault(point["run"], []).append(point)
    thin = {"color": look["color"], "linestyle": look["linestyle"], "linewidth": 0.6, "alpha": 0.5}
    for points in by_run.values() if len(by_run) > 1 else ():
        axes.plot([point["step"] for point in points], [point["accuracy"] for point in points], **thin)
    mean = sorted(over_seeds(curves, by=["step"], values=["accuracy"]), key=lambda point: point["step"])
    axes.plot([point["step"] for point in mean], [point["accuracy"] for point in mean], **look)
