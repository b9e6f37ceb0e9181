"""Options of analyses, and where they go: numbers as JSON and CSV, a figure as SVG and PNG, one caption for all."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.files import replacing, write_json
from klformer.lab.data import Examples
from klformer.lab.environment import describe_environment, typed_command
from klformer.lab.plotting import save
from klformer.lab.runs.load import LoadedRun
from klformer.lab.tables import Table
from klformer.lab.training.objectives import Classification

Full = TypeVar("Full", int, None)


@dataclass(frozen=True)
class Count(Generic[Full]):
    """A count that is an option of an analysis.

    Args:
        full: What it is if it is not given; None for no limit.
        quick: What it is then with --quick.
        minimum: The smallest that makes sense.
    """

    name: str
    full: Full
    quick: int
    minimum: int = 1

    def choose(self, given: int | None, *, quick: bool) -> int | Full:
        """Return what was given, or else the default."""
        if given is not None:
            return given
        return self.quick if quick else self.full


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions:
    """Options of every analysis."""

    #: Those of its options that are counts.
    counts: ClassVar[tuple[Count[Any], ...]] = ()

    quick: bool = False
    """Do less, where nothing else is said."""
    out: Path = Path("analysis")
    """Folder for the results."""

    def __post_init__(self) -> None:
        for count in self.counts:
            if (given := getattr(self, count.name)) is not None:
                check_count(count.name, given, count.minimum)

    def choose(self, count: Count[Full]) -> int | Full:
        """Return what was given for a count, or else its default."""
        return count.choose(getattr(self, count.name), quick=self.quick)


@dataclass(frozen=True, kw_only=True)
class RunsAnalysis(AnalysisOptions):
    """Options of every analysis of several runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Runs, or folders of runs."""


def some_of(examples: Examples, limit: int | None) -> Examples:
    """Choose so many of the examples at random, the same for all runs; all if there is no limit.

    Not the first ones: data may be sorted by class, as IMDB is.
    """
    if limit is None or limit >= len(examples):
        return examples
    return examples.take(np.sort(np.random.default_rng(0).permutation(len(examples))[:limit]))


def check_classification(loaded: LoadedRun, analysis: str) -> None:
    """Raise ArgumentError unless the run gives every sequence a class."""
    if not isinstance(loaded.task.objective(), Classification):
        raise ArgumentError(
            f"{loaded.folder}: {analysis} needs one class for each sequence; the task {loaded.config.task} has none"
        )


def write_results(
    folder: Path,
    name: str,
    *,
    caption: str,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    figure: Figure | None = None,
) -> list[Path]:
    """Write name.json, name.csv and, with a figure, name.svg and name.png.

    Args:
        caption: One or two sentences that say what the rows and the figure show; under the figure as well.
        rows: The numbers, one flat mapping a row, all with the same keys.
        settings: What the numbers depend on: runs, draws, seeds.

    In the JSON a number that is not finite is null, because JSON has no other word for it.

    Returns:
        What was written.
    """
    report = {
        "caption": caption,
        "environment": describe_environment(),
        "command": typed_command(),
        "settings": settings,
        "rows": rows,
    }
    written = [folder / f"{name}.json", folder / f"{name}.csv"]
    write_json(written[0], report)
    write_csv(written[1], rows)
    if figure is not None:
        figure.supxlabel(caption, fontsize=8, wrap=True)
        written += [folder / f"{name}.svg", folder / f"{name}.png"]
        save(figure, *written[2:])
    return written


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows, all with the same keys, under one header. Raises as `replacing`."""
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def print_table(console: Console, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the rows; their keys are the headings."""
    Table.of([{str(key).replace("_", " "): value for key, value in row.items()} for row in rows], title).print(console)
