"""`analyze pretraining`: hidden tokens that pretrained runs guess, beside what their frequency alone gives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from klformer.errors import ArgumentError
from klformer.lab.analysis.output import print_table, write_results
from klformer.lab.plotting import MARKERS, WIDE, line_style
from klformer.lab.runs.find import find_runs
from klformer.lab.runs.folder import RunFolder, what_it_took
from klformer.lab.runs.naming import attention_label, setting_name
from klformer.lab.terminal import make_console

Row = dict[str, Any]

CAPTION = (
    "Accuracy on hidden tokens and their perplexity on the test set, and what the frequency of the tokens alone gives."
)
#: Columns on screen; the files have all.
SHOWN = ("setting", "attention", "seed", "masked_accuracy", "perplexity", "unigram_accuracy", "unigram_perplexity",
         "steps", "train_seconds")  # fmt: skip
CURVES_CAPTION = "Accuracy on hidden tokens of the validation set against steps, in %, run by run."


@dataclass(frozen=True)
class PretrainingAnalysis:
    """Accuracy and perplexity on hidden tokens of pretrained runs, beside what the frequency of tokens alone gives.

    Example:

      klformer --plugin research analyze pretraining runs
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Runs, or folders of runs; those that were not pretrained are passed over."""
    out: Path = Path("analysis")
    """Folder for the results."""


def run(options: PretrainingAnalysis) -> None:
    """Write pretraining.json, .csv, .svg and .png and pretraining-curves.json and .csv, and print the table.

    Raises:
        ArgumentError: no run was pretrained to its end.
    """
    folders = [RunFolder(path) for place in options.runs for path in find_runs(place.expanduser())]
    pretrained = [folder for folder in folders if folder.config().objective == "masked" and folder.result() is not None]
    if not pretrained:
        raise ArgumentError(f"no run in {', '.join(map(str, options.runs))} was pretrained to its end")
    rows = [_row(folder) for folder in pretrained]
    curves = [point for folder in pretrained for point in _curve(folder)]
    figure = draw(rows, curves)
    write_results(options.out, "pretraining", caption=CAPTION, rows=rows, settings={}, figure=figure)
    write_results(options.out, "pretraining-curves", caption=CURVES_CAPTION, rows=curves, settings={})
    console = make_console(170)
    print_table(console, [{name: row[name] for name in SHOWN} for row in rows], CAPTION)
    console.print(f"written to {options.out}", highlight=False)


def _row(folder: RunFolder) -> Row:
    result = folder.result()
    assert result is not None, "only finished runs are asked"
    test, unigram = result["test"], result["unigram"]
    return _known(folder) | {
        "masked_accuracy": 100 * test["masked_accuracy"],
        "perplexity": test["perplexity"],
        "over_draws": 100 * test["masked_accuracy_std"] if test["draws"] > 1 else None,
        "unigram_accuracy": 100 * unigram["masked_accuracy"],
        "unigram_perplexity": unigram["perplexity"],
        "parameters": result["parameters"],
        **what_it_took(result),
    }


def _curve(folder: RunFolder) -> Iterator[Row]:
    for point in folder.metrics("validation"):
        yield _known(folder) | {"step": point["step"], "masked_accuracy": 100 * point["masked_accuracy"]}


def _known(folder: RunFolder) -> Row:
    config = folder.config()
    return {"setting": setting_name(config), "attention": attention_label(config), "seed": config.seed}


def draw(rows: Sequence[Mapping[str, Any]], curves: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy against steps, a line a run with the name of its attention; that of the frequencies alone is dotted."""
    figure, axes = plt.subplots(figsize=(WIDE, 4.2), layout="constrained")
    runs = dict.fromkeys((row["setting"], row["attention"], row["seed"]) for row in rows)
    names = {attention: number for number, attention in enumerate(dict.fromkeys(row["attention"] for row in rows))}
    labelled: set[str] = set()
    for setting, attention, seed in runs:
        points = [
            (point["step"], point["masked_accuracy"])
            for point in curves
            if (point["setting"], point["attention"], point["seed"]) == (setting, attention, seed)
        ]
        number = names[attention]
        label = None if attention in labelled else attention
        labelled.add(attention)
        axes.plot(
            *zip(*points, strict=True),
            label=label,
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            **line_style(number),
        )
    for accuracy in {row["unigram_accuracy"] for row in rows}:
        axes.axhline(accuracy, color="#8a8f98", linestyle=":")
        axes.annotate("frequency of tokens alone", (0, accuracy), (4, 3), textcoords="offset points", fontsize=10)
    axes.set(xlabel="training step", ylabel="hidden tokens guessed, %", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", ncols=2, bbox_to_anchor=(1, 0.14))  # above the line of the frequencies
    return figure
