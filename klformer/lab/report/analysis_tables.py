"""The tables of analyses: variance of predictions, and eigenvalues beside the paper's."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from klformer.lab.report import paper_numbers
from klformer.lab.report.collect import Analysis
from klformer.lab.report.paper_numbers import EIGENVALUES
from klformer.lab.report.run import Run
from klformer.lab.tables import MISSING, Cell, Column, Table, finite, number, percent, words


def variance_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Tabulate the measures of variance of all runs."""
    columns = (
        Column("run", numeric=False),
        Column("task", numeric=False),
        Column("attention", numeric=False),
        Column("RSD", "here", hint="relative standard deviation of the output over draws"),
        Column("PI", "here", hint="prediction inconsistency: draws that disagree with the majority, in percent"),
        Column("AGV", "here", hint="accuracy gain with voting: voting accuracy / accuracy"),
        Column("vote, %", "here", hint="accuracy of the majority vote"),
        Column("accuracy, %", "here"),
    )
    cells = tuple(
        (
            words(row["run"]),
            words(row.get("task", "")),
            words(row["attention"], code=True),
            *(number(row.get(key), "{:.4g}") for key in ("rsd", "pi", "agv")),
            *(percent(row.get(key)) for key in ("voting_accuracy", "accuracy")),
        )
        for row in rows
    )
    return Table("Variance of predictions over draws of the frequencies", columns, cells, name="variance")


def eigenvalue_table(analyses: Sequence[Analysis], runs: Sequence[Run]) -> Table:
    """Tabulate the paper's summary of the eigenvalues, and the same of these runs with their initial values."""
    columns = (
        Column("figures of", numeric=False),
        Column("task", numeric=False),
        Column("attention", numeric=False),
        Column("heads"),
        Column("largest", group="trained"),
        Column("mean", group="trained"),
        Column("largest", group="at initialisation"),
        Column("mean", group="at initialisation"),
    )
    rows: list[tuple[Cell, ...]] = []
    for paper in EIGENVALUES:
        rows.append(
            (
                Cell("paper", "paper", source="paper"),
                words(paper.task),
                words(paper.attention, code=True),
                number(len(paper.heads), "{:.0f}"),
                _beside_printed(paper.maximum(), paper.printed_maximum),
                _beside_printed(paper.mean(), paper.printed_mean),
                MISSING,
                MISSING,
            )
        )
    for run, heads in _by_run(analyses):
        rows.append(
            (
                Cell("here", "here", note=run, source="here"),
                words(_task_of(run, runs)),
                words(heads[0]["attention"], code=True),
                number(len(heads), "{:.0f}"),
                number(_over(heads, "maximum", max), "{:#.3g}"),
                number(_over(heads, "mean", fmean), "{:#.3g}"),
                number(_over(heads, "initial_maximum", max), "{:#.3g}"),
                number(_over(heads, "initial_mean", fmean), "{:#.3g}"),
            )
        )
    return Table("Eigenvalues of the covariance of the frequencies", columns, tuple(rows), name="eigenvalues")


def _beside_printed(value: float, printed: float) -> Cell:
    """Return a figure of the paper's tables by heads, with what its summary prints if that looks different."""
    shown, summary = f"{value:.3f}", f"{printed:.3f}"
    return Cell(shown, value, note="" if shown == summary else f"printed {summary}")


def eigenvalue_head_tables(analyses: Sequence[Analysis]) -> list[Table]:
    """Tabulate eigenvalues by layer and head: these runs', then the paper's."""
    place = (Column("layer"), Column("head"))
    values = ("minimum", "maximum", "mean")
    tables = []
    for position, (run, heads) in enumerate(_by_run(analyses)):
        columns = (
            *place,
            *(Column(name, "here", "trained") for name in values),
            *(Column(name, "here", "at initialisation") for name in values),
        )
        keys = (*values, *(f"initial_{name}" for name in values))
        rows = tuple(
            (
                number(head.get("layer"), "{:.0f}"),
                number(head.get("head"), "{:.0f}"),
                *(number(head.get(key), "{:.3e}") for key in keys),
            )
            for head in heads
        )
        tables.append(Table(f"Here: {run}", columns, rows, name=f"heads-{position}"))
    for position, paper in enumerate(EIGENVALUES):
        paper_columns = (*place, *(Column(name, "paper", "trained") for name in values))
        paper_rows = tuple(
            (
                number(index // paper_numbers.HEADS_PER_LAYER + 1, "{:.0f}"),
                number(index % paper_numbers.HEADS_PER_LAYER + 1, "{:.0f}"),
                *(number(value, "{:.3e}") for value in head),
            )
            for index, head in enumerate(paper.heads)
        )
        tables.append(Table(f"The paper: {paper.table}", paper_columns, paper_rows, name=f"paper-heads-{position}"))
    return tables


def _by_run(analyses: Sequence[Analysis]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return names of runs with their rows; runs of two analyses may have the same name."""
    by_run: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for place, analysis in enumerate(analyses):
        for row in analysis.rows:
            by_run.setdefault((place, str(row["run"])), []).append(row)
    return [(name, rows) for (_, name), rows in by_run.items()]


def _task_of(name: str, runs: Sequence[Run]) -> str:
    """Return the task of the runs with this name, nothing if they have several."""
    tasks = {run.task.name for run in runs if run.name == name}
    return tasks.pop() if len(tasks) == 1 else ""


def _over(rows: Sequence[Mapping[str, Any]], key: str, summary: Callable[[Sequence[float]], float]) -> float | None:
    values = [value for row in rows if (value := finite(row.get(key))) is not None]
    return summary(values) if values else None
