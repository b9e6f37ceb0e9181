"""`klformer analyze variance`: how much of the predictions is chance (the paper's "Comparison of variance")."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from klformer.analysis.variance import FloatArray, r_squared, variance_metrics
from klformer.experiments.analyze.output import print_table, write_results
from klformer.experiments.run import LoadedRun, attention_label, load_run
from klformer.plotting import COLOURS, MARKERS
from klformer.tasks import BucketSampler, Examples, collate
from klformer.training.evaluation import evaluating, has_noise, scores_of_draws
from klformer.training.progress import make_reporter

CAPTION = (
    "Relative standard deviation of the output (RSD, mean over examples), prediction inconsistency (PI), accuracy gain "
    "with voting (AGV = vote / mean accuracy) and voting accuracy (VA) over {draws} draws of the frequencies."
)


@dataclass(frozen=True)
class VarianceAnalysis:
    """Variance of predictions over draws of the frequencies, of one run or several.

    Every batch that is finished is kept, so that a stopped analysis goes on where it was. Example:

      klformer analyze variance runs/text-laptop-* --draws 100
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    draws: int = 100
    """Draws of the frequencies."""
    split: Literal["validation", "test"] = "validation"
    """Examples to look at."""
    limit: int | None = None
    """Only so many of them, the first."""
    quick: bool = False
    """10 draws of 200 examples."""
    data_root: Path | None = None
    """Where the data is, if not where it was in training."""
    out: Path = Path("analysis")
    """Folder for the results."""


def run(options: VarianceAnalysis) -> None:
    """Collect the scores, print and write the measures."""
    draws, limit = (10, 200) if options.quick else (options.draws, options.limit)
    if draws < 2:
        raise ValueError(f"draws must be at least 2, got {draws}")
    console, reporter = Console(width=max(150, Console().width)), make_reporter(quiet=False)
    rows = []
    for folder in options.runs:
        loaded = load_run(folder, reporter, data_root=options.data_root)
        if not has_noise(loaded.model):
            reporter.say(f"{folder}: {loaded.config.attention.name} has nothing that is drawn at random; left out")
            continue
        examples = loaded.task.load(options.split)
        if limit is not None:
            examples = examples.take(np.arange(min(limit, len(examples))))
        key = _fingerprint(loaded, examples)
        store = options.out / "variance-scores" / f"{folder.name}-{options.split}-{draws}draws-{key}"
        scores = collect_scores(loaded, examples, store, draws=draws)
        row = {"run": folder.name, "attention": attention_label(loaded.config), "task": loaded.config.task}
        rows.append(row | asdict(variance_metrics(scores, examples.labels)) | {"examples": len(examples)})
    if not rows:
        raise ValueError("none of the runs has noise to draw")
    print_table(console, rows, f"variance over {draws} draws")
    correlations = correlate(rows)
    for pair, value in correlations.items():
        console.print(f"R^2 {pair}: {value:.2f} over {len(rows)} runs")
    settings = {"draws": draws, "split": options.split, "limit": limit, "r_squared": correlations}
    caption = CAPTION.format(draws=draws)
    write_results(options.out, "variance", caption=caption, rows=rows, settings=settings, figure=draw_bars(rows))
    if len(rows) > 2:
        caption = f"The three measures against each other, one point a run; R^2 over {len(rows)} runs."
        figure = draw_correlations(rows, correlations)
        write_results(
            options.out, "variance-correlations", caption=caption, rows=rows, settings=settings, figure=figure
        )
    console.print(f"written to {options.out}", highlight=False)


def _fingerprint(loaded: LoadedRun, examples: Examples) -> str:
    """What the scores depend on, besides the draws: weights, seed and examples."""
    digest = hashlib.sha256(f"{loaded.config.seed}/{len(examples)}".encode())
    for parameter in loaded.model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    for array in (examples.labels, examples.lengths):
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def collect_scores(loaded: LoadedRun, examples: Examples, store: Path, *, draws: int) -> FloatArray:
    """Scores (draws, N, K), from `store` where they are there already."""
    store.mkdir(parents=True, exist_ok=True)
    batch_size = loaded.config.training.evaluation_batch_size
    batches = list(BucketSampler(examples.lengths, batch_size=batch_size, shuffle=False).epoch(0))
    scores = np.zeros((draws, len(examples), loaded.task.num_classes))
    with Progress(transient=True) as progress, evaluating(loaded.model):
        bar = progress.add_task(loaded.folder.name, total=len(batches))
        for number, indices in enumerate(batches):
            path = store / f"batch-{number:05d}-of-{len(batches)}-with-{len(examples)}.npy"
            if not path.exists():
                batch = collate(examples, indices)
                found = scores_of_draws(loaded.model, batch, range(draws), seed=loaded.config.seed)
                temporary = path.with_suffix(".tmp.npy")
                np.save(temporary, found.double().numpy())
                temporary.replace(path)
            scores[:, indices] = np.load(path)
            progress.advance(bar)
    return scores


def correlate(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """R^2 between the three measures over runs."""
    columns = {name: np.array([row[name] for row in rows]) for name in ("rsd", "agv", "pi")}
    return {f"{a}-{b}": r_squared(columns[a], columns[b]) for a, b in combinations(columns, 2)}


def draw_bars(rows: Sequence[dict[str, Any]]) -> Figure:
    """One panel a measure, one bar a run: the paper's bar figure."""
    panels = [("rsd", "RSD"), ("pi", "PI, % of draws"), ("agv", "AGV"), ("voting_accuracy", "voting accuracy, %")]
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(11, 1.8 + 0.28 * len(rows)), layout="constrained", sharey=True
    )
    labels = [row["attention"] for row in rows]
    if len(set(labels)) < len(labels):
        labels = [row["run"] for row in rows]
    for axes, (key, title), colour in zip(all_axes, panels, COLOURS, strict=False):
        values = [row[key] * (100 if key == "voting_accuracy" else 1) for row in rows]
        bars = axes.barh(range(len(rows)), values, color=colour, height=0.7)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axes.set_xlim(min(0.98 * min(values), 1) if key == "agv" else 0, max(values) * 1.2 or 1)
        axes.set_title(title, fontsize=10)
        axes.set_yticks(range(len(rows)), labels, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].invert_yaxis()
    return figure


def draw_correlations(rows: Sequence[dict[str, Any]], correlations: dict[str, float]) -> Figure:
    """The paper's scatter plots."""
    titles = {"rsd": "RSD", "agv": "AGV", "pi": "PI, % of draws"}
    figure, all_axes = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
    for axes, (a, b) in zip(all_axes, combinations(titles, 2), strict=True):
        for number, row in enumerate(rows):
            marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
            axes.scatter(row[a], row[b], marker=marker, color=colour, s=45, label=row["attention"])
        axes.set_xlabel(titles[a])
        axes.set_ylabel(titles[b])
        axes.set_title(f"R² = {correlations[f'{a}-{b}']:.2f}", fontsize=10)
        axes.grid(alpha=0.3)
    all_axes[-1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
