"""`klformer analyze gradients`: gradients at the classifier on the way to the solution, and learning curves."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from klformer.analysis.gradients import classifier_gradients, gradient_statistics
from klformer.experiments.analyze.output import print_table, write_results
from klformer.experiments.run import attention_label, load_run
from klformer.models import SequenceClassifier
from klformer.plotting import COLOURS, MARKERS, STYLES
from klformer.tasks import collate
from klformer.training.checkpoint import MILESTONES, CheckpointStore, milestone
from klformer.training.errors import TrainingError
from klformer.training.log import read_lines
from klformer.training.progress import make_reporter

CAPTION = (
    "Left: validation accuracy against steps. Right: deviation of the gradients at the hidden units of the classifier, "
    "over {examples} validation examples and {draws} draws, when the accuracy first reached 20, 40, 60 and 80%."
)


@dataclass(frozen=True)
class GradientAnalysis:
    """Mean and deviation of the gradients at the classifier, when accuracy first reached 20, 40, 60 and 80%.

    For runs that kept the weights of these moments (training.keep-milestones, on for the sparsity task). Example:

      klformer analyze gradients runs/sparsity0.*-laptop-gmm-rks-seed0 runs/sparsity0.*-laptop-gmm-prf-seed0
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    examples: int = 50
    """The first so many validation examples."""
    draws: int = 50
    """Draws of the frequencies."""
    quick: bool = False
    """10 examples, 5 draws."""
    data_root: Path | None = None
    """Where the data is, if not where it was in training."""
    out: Path = Path("analysis")
    """Folder for the results."""


def run(options: GradientAnalysis) -> None:
    """Compute, print and write the table and the figure."""
    examples, draws = (10, 5) if options.quick else (options.examples, options.draws)
    if examples < 1 or draws < 1:
        raise ValueError(f"examples and draws must be at least 1, got {examples} and {draws}")
    rows: list[dict[str, Any]] = []
    with Progress(transient=True) as progress:
        bar = progress.add_task("gradients", total=len(options.runs) * len(MILESTONES))
        for folder in options.runs:
            for row in _rows_of(folder, options.data_root, examples, draws):
                rows.append(row)
                progress.advance(bar)
    console = Console(width=max(120, Console().width))
    print_table(console, rows, f"gradients at the classifier, {examples} examples x {draws} draws")
    settings = {"examples": examples, "draws": draws}
    caption = CAPTION.format(examples=examples, draws=draws)
    figure = draw(options.runs, rows)
    write_results(options.out, "gradients", caption=caption, rows=rows, settings=settings, figure=figure)
    console.print(f"written to {options.out}", highlight=False)


def _rows_of(folder: Path, data_root: Path | None, examples: int, draws: int) -> list[dict[str, Any]]:
    """One row for every milestone that the run has reached."""
    reporter = make_reporter(quiet=False)
    loaded = load_run(folder, reporter, data_root=data_root)
    if not isinstance(loaded.model, SequenceClassifier):
        raise ValueError(f"{folder}: gradients are defined for classifiers of single sequences, not of pairs")
    if not loaded.config.training.keep_milestones:
        raise TrainingError(f"{folder} has not kept its weights on the way; train with --training.keep-milestones")
    validation = loaded.task.load("validation")
    batch = collate(validation, np.arange(min(examples, len(validation))))
    store = CheckpointStore(folder / "checkpoints", reporter.say)
    rows = []
    for percent in MILESTONES:
        checkpoint = store.newest(milestone(percent))
        if checkpoint is None:
            reporter.say(f"{folder} has not reached {percent}%")
            continue
        loaded.model.load_state_dict(checkpoint.weights())
        gradients = classifier_gradients(loaded.model, batch, draws=draws, seed=loaded.config.seed)
        rows.append(
            {
                "run": folder.name,
                "attention": attention_label(loaded.config),
                "sparsity": loaded.config.data.sparsity,
                "reached": percent,
                "step": checkpoint.step,
                "accuracy": float(checkpoint.info["validation_accuracy"]),
            }
            | asdict(gradient_statistics(gradients))
        )
    return rows


def draw(folders: tuple[Path, ...], rows: list[dict[str, Any]]) -> Figure:
    """Learning curves, and the deviations at the milestones; colours by attention, dashes by sparsity."""
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    sparsities = sorted({row["sparsity"] for row in rows})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for folder in folders:
        mine = [row for row in rows if row["run"] == folder.name]
        if not mine:
            continue
        look: dict[str, Any] = {
            "color": COLOURS[attentions.index(mine[0]["attention"]) % len(COLOURS)],
            "linestyle": STYLES[sparsities.index(mine[0]["sparsity"]) % len(STYLES)],
            "marker": MARKERS[sparsities.index(mine[0]["sparsity"]) % len(MARKERS)],
            "markersize": 4,
        }
        label = f"{mine[0]['attention']}, p = {mine[0]['sparsity']:g}"
        points = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "validation"]
        left.plot([p["step"] for p in points], [100 * p["accuracy"] for p in points], label=label, **look)
        right.plot([row["reached"] for row in mine], [row["deviation"] for row in mine], label=label, **look)
    left.set_xlabel("training step")
    left.set_ylabel("validation accuracy, %")
    right.set_xlabel("validation accuracy first reached, %")
    right.set_ylabel("deviation of the gradients")
    right.set_yscale("log")
    right.set_xticks(MILESTONES)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=7, frameon=False)
    return figure
