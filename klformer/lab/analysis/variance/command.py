"""`klformer analyze variance`: how much of the predictions is chance (the paper's "Comparison of variance")."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.files import replacing
from klformer.lab.analysis.output import Count, RunsAnalysis, check_classification, print_table, some_of, write_results
from klformer.lab.analysis.seeds import over_seeds
from klformer.lab.analysis.variance.measure import FloatArray, r_squared, variance_metrics
from klformer.lab.data import BucketSampler, Examples, collate
from klformer.lab.plotting import COLOURS, FIXED, LEARNED, MARKERS, WIDE, run_labels
from klformer.lab.runs.load import LoadedRun, RunReader
from klformer.lab.runs.naming import attention_label, task_label
from klformer.lab.terminal import make_console
from klformer.lab.training.evaluation import each_draw, evaluating
from klformer.lab.training.progress import make_reporter
from klformer.noise import has_noise

Row = dict[str, Any]

CAPTION = (
    "Relative standard deviation of the output (RSD, mean over examples), prediction inconsistency (PI), accuracy gain "
    "with voting (AGV = vote / mean accuracy) and voting accuracy (VA) over {draws} draws of the frequencies."
)
DRAWS = Count("draws", full=100, quick=10, minimum=2)
LIMIT = Count("limit", full=None, quick=200)
#: Through two points there is always a line.
FEWEST_RUNS = 3
#: What is correlated: the paper's three measures, and the median of RSD, which examples near the decision do not rule.
PAIRS = (*combinations(("rsd", "agv", "pi"), 2), ("rsd_median", "agv"), ("rsd_median", "pi"))
#: Colours by what a kernel is made of.
FOURIER, POSITIVE, FIXED_KERNEL = "Fourier features, rks", "positive features, prf", "a fixed kernel"
KINDS = {FOURIER: LEARNED, POSITIVE: COLOURS[2], FIXED_KERNEL: FIXED}
#: Draws of a batch that are kept in one file.
BLOCK = 10


@dataclass(frozen=True, kw_only=True)
class VarianceAnalysis(RunsAnalysis):
    """Variance of predictions over draws of the frequencies, of one run or several.

    What is finished is kept, ten draws of a batch at a time: a stopped analysis goes on where it was, and one with more
    draws starts from those that are there. Of several learning
    rates, that is taken which is best on validation at the first seed that has several. Example:

      klformer analyze variance runs/text-laptop-* --draws 100
    """

    counts: ClassVar[tuple[Count[Any], ...]] = (
        DRAWS,
        LIMIT,
    )

    draws: int | None = None
    """Draws of the frequencies; 100, or 10 with --quick."""
    split: Literal["validation", "test"] = "validation"
    """Examples to look at."""
    limit: int | None = None
    """Only so many of them, at random; all, or 200 with --quick."""
    data_root: Path | None = None
    """Where the data is, if not where it was in training."""


def run(options: VarianceAnalysis) -> None:
    """Collect the scores, print and write the measures."""
    draws = options.choose(DRAWS)
    limit = options.choose(LIMIT)
    console, reporter = make_console(150), make_reporter(quiet=False)
    rows: list[Row] = []
    reader = RunReader(reporter, data_root=options.data_root)
    for loaded in reader.read(options.runs):
        folder = loaded.folder
        check_classification(loaded, "variance")
        if not has_noise(loaded.model):
            reporter.say(f"{folder}: {loaded.config.attention.name} has nothing that is drawn at random; left out")
            continue
        examples = some_of(loaded.examples(options.split), limit)
        key = _fingerprint(loaded, examples)
        store = options.out / "variance-scores" / f"{folder.name}-{options.split}-{key}"
        scores = collect_scores(loaded, examples, store, draws=draws)
        row = {
            "run": folder.name,
            "attention": attention_label(loaded.config),
            "task": task_label(loaded.config),
            "seed": loaded.config.seed,
            "folder": folder.resolve().parent.name,
        }
        rows.append(row | asdict(variance_metrics(scores, examples.targets)) | {"examples": len(examples)})
    if not rows:
        reader.finish()
        raise ArgumentError("none of the runs has noise to draw")
    print_table(console, rows, f"variance over {draws} draws")
    correlations = correlate(rows)
    for line in describe_correlations(rows, correlations):
        console.print(line, highlight=False)
    settings = {"draws": draws, "split": options.split, "limit": limit, "r_squared": correlations}
    caption = CAPTION.format(draws=draws)
    write_results(options.out, "variance", caption=caption, rows=rows, settings=settings, figure=draw_dots(rows))
    if correlations:
        caption = (
            "The three measures against each other, one row of panels a task, one point a run. "
            "R² is that of the values, not of their logarithms."
        )
        compared = [row for row in rows if row["task"] in correlations]
        figure = draw_correlations(compared, correlations)
        write_results(
            options.out, "variance-correlations", caption=caption, rows=compared, settings=settings, figure=figure
        )
    console.print(f"written to {options.out}", highlight=False)
    reader.finish()


def _fingerprint(loaded: LoadedRun, examples: Examples) -> str:
    """Return what the scores depend on, besides the draws: weights, seed, examples and how they are batched."""
    batch_size = loaded.config.training.evaluation_batch_size
    digest = hashlib.sha256(f"{loaded.config.seed}/{len(examples)}/{batch_size}".encode())
    for parameter in loaded.model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    for array in (examples.targets, examples.lengths):
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def collect_scores(loaded: LoadedRun, examples: Examples, store: Path, *, draws: int) -> FloatArray:
    """Return the scores (draws, N, K), from `store` where they are there already."""
    store.mkdir(parents=True, exist_ok=True)
    batch_size = loaded.config.training.evaluation_batch_size
    batches = BucketSampler(examples.lengths, batch_size=batch_size, shuffle=False).batches(0)
    spans = [range(start, min(start + BLOCK, draws)) for start in range(0, draws, BLOCK)]
    scores = np.zeros((draws, len(examples), loaded.task.objective().num_outputs))
    with Progress(transient=True) as progress, evaluating(loaded.model):
        bar = progress.add_task(loaded.folder.name, total=len(batches) * len(spans))
        for number, indices in enumerate(batches):
            name = f"batch-{number:05d}-of-{len(batches)}-draws-from-{{:05d}}.npy"
            blocks = [_Block.read(store / name.format(span.start), span) for span in spans]
            # One pass over all that is missing, so that what has no part in the draws is computed once.
            missing = [draw for block in blocks for draw in block.missing]
            fresh = each_draw(loaded.model, collate(examples, indices), missing, seed=loaded.config.seed)
            for block in blocks:
                scores[block.draws.start : block.draws.stop, indices] = block.complete(fresh)
                progress.advance(bar)
    return scores


@dataclass(frozen=True)
class _Block:
    """Scores of one batch under some draws in a row, in a file that may have less of them, or more."""

    path: Path
    draws: range
    kept: FloatArray | None  # (draws, B, K)

    @classmethod
    def read(cls, path: Path, draws: range) -> "_Block":
        return cls(path, draws, np.load(path) if path.exists() else None)

    @property
    def missing(self) -> range:
        return self.draws if self.kept is None else self.draws[len(self.kept) :]

    def complete(self, fresh: Iterator[Tensor]) -> FloatArray:
        """Return what is kept, with as many fresh scores as are missing, and keep those."""
        found = [] if self.kept is None else list(self.kept[: len(self.draws)])
        if self.missing:
            found += [scores.double().numpy() for scores in islice(fresh, len(self.missing))]
            with replacing(self.path) as temporary, temporary.open("wb") as file:
                np.save(file, np.stack(found))
        return np.stack(found)


def correlate(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return R^2 between the measures over the runs of a task, by task; tasks of less than three runs are left out."""
    found = {}
    for task, of_task in by_task(rows).items():
        if len(of_task) >= FEWEST_RUNS:
            columns = {name: np.array([row[name] for row in of_task]) for name in ("rsd", "agv", "pi", "rsd_median")}
            found[task] = {f"{a}-{b}": r_squared(columns[a], columns[b]) for a, b in PAIRS}
    return found


def by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of every task, in the order in which the tasks appear."""
    return {task: [row for row in rows if row["task"] == task] for task in dict.fromkeys(row["task"] for row in rows)}


def describe_correlations(rows: Sequence[Row], correlations: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a line for every R^2, or why there is none; it is not defined where a measure is the same for all runs."""
    for task, of_task in by_task(rows).items():
        if task not in correlations:
            yield f"no R^2 for {task}: it takes {FEWEST_RUNS} runs of the task, there are {len(of_task)}"
        for pair, value in correlations.get(task, {}).items():
            yield f"R^2 {pair}, {task}: {_r_squared(value)} over {len(of_task)} runs"


def _r_squared(value: float) -> str:
    return "not defined" if math.isnan(value) else f"{value:.2f}"


def draw_dots(rows: Sequence[Row]) -> Figure:
    """Draw a panel a measure and a dot an attention, with the standard error over its seeds: the paper's bar figure."""
    panels = {"rsd": "RSD, log axis", "pi": "PI, % of draws", "agv": "AGV", "voting_accuracy": "voting accuracy, %"}
    dots = over_seeds(rows, by=("attention", "task", "folder"), values=list(panels))
    height = 1.6 + 2 * (0.6 + 0.22 * len(dots))
    figure, grid = plt.subplots(2, 2, figsize=(WIDE, height), layout="constrained", sharey=True)
    for axes, (key, title) in zip(grid.flat, panels.items(), strict=True):
        factor = 100 if key == "voting_accuracy" else 1
        for place, dot in enumerate(dots):
            kind, colour = _kind(dot["attention"])
            if dot[key] is not None:
                value, error = factor * dot[key], factor * (dot[f"{key}_error"] or 0)
                axes.errorbar(value, place, xerr=error, fmt="o", color=colour, capsize=2, label=kind)
            text = "not finite" if dot[key] is None else f"{factor * dot[key]:.3g}"
            axes.annotate(
                text, (1, place), (4, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points", va="center"
            ).set_fontsize(9)
        axes.set_title(title)
        axes.set_yticks(range(len(dots)), run_labels(dots))
        axes.grid(alpha=0.3)
        if key == "rsd":
            _spread_out(axes, [dot[key] for dot in dots])
    grid[0, 0].set_ylim(len(dots) - 0.5, -0.5)
    figure.legend(*_once(grid.flat), loc="outside upper center", ncols=len(KINDS))
    return figure


def _kind(attention: str) -> tuple[str, str]:
    """Return what the kernel of an attention is, and its colour."""
    name = attention.partition(":")[0]
    learned = {"rks": FOURIER, "prf": POSITIVE}
    kind = FIXED_KERNEL if name == "rbf-rks" else learned.get(name.rpartition("-")[2], FIXED_KERNEL)
    return kind, KINDS[kind]


def _spread_out(axes: Axes, values: Sequence[float | None]) -> None:
    """Make an axis logarithmic, if every value that is there has a logarithm."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if found and min(found) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _once(panels: Iterable[Axes]) -> tuple[list[Any], list[str]]:
    """Return handles and names for one legend of several panels."""
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    return list(named.values()), list(named)


def draw_correlations(rows: Sequence[Row], correlations: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the paper's scatter plots, one row of panels a task, one point a run; all seeds of an attention look
    alike."""
    titles = {"rsd": "RSD, log axis", "agv": "AGV", "pi": "PI, % of draws"}
    height = 1.0 + 2.7 * len(correlations)
    figure, grid = plt.subplots(
        len(correlations), len(titles), figsize=(WIDE, height), layout="constrained", squeeze=False
    )
    attentions = list(dict.fromkeys(row["attention"] for row in rows if row["task"] in correlations))
    for (task, values), panels in zip(correlations.items(), grid, strict=True):
        of_task = by_task(rows)[task]
        for axes, (a, b) in zip(panels, combinations(titles, 2), strict=True):
            for number, attention in enumerate(attentions):
                points = [(row[a], row[b]) for row in of_task if row["attention"] == attention]
                marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
                if points:
                    axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, s=40, label=attention)
            axes.set_xlabel(titles[a])
            axes.set_ylabel(titles[b])
            axes.set_title(f"{task}, {len(of_task)} runs\nR² {_r_squared(values[f'{a}-{b}'])}")
            axes.grid(alpha=0.3)
            if a == "rsd":
                _spread_out(axes, [row[a] for row in of_task])
    figure.legend(*_once(grid.flat), loc="outside upper center", ncols=4)
    return figure
