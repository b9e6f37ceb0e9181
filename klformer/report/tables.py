"""The tables of a report as plain data: columns and cells, each cell with the text to show and the value to sort by."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from klformer.memory import MEBIBYTE
from klformer.report import paper_numbers
from klformer.report.collect import Analysis, Run
from klformer.report.paper_numbers import EIGENVALUES, GLUE, GLUE_COLUMNS, LRA, LRA_TASKS, RANDOM, LraRow
from klformer.report.reading import finite
from klformer.report.settings import Group, Setting, attention_order, count, task_title

#: Whose figure it is: printed in the paper, or from the runs of this report.
Source = Literal["", "paper", "here"]
#: What runs may call the metrics of the GLUE table.
METRIC_NAMES = {
    "accuracy": ("accuracy",),
    "f1": ("f1",),
    "matthews": ("matthews", "matthews_correlation", "mcc"),
}
METRIC_TITLES = {"accuracy": "acc", "f1": "F1", "matthews": "MCC"}


@dataclass(frozen=True)
class Column:
    """A column; neighbours with the same group stand under one heading."""

    title: str
    source: Source = ""
    group: str = ""
    numeric: bool = True
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """What is shown, and what is sorted by; without the latter the cell is missing."""

    text: str = "\N{EN DASH}"
    sort: float | str | None = None
    #: Small print behind the text.
    note: str = ""
    best: bool = False
    code: bool = False
    #: Whose figure it is, where the column does not say so.
    source: Source = ""
    #: The text is long and may go over several lines.
    wrap: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    #: Small print below it.
    notes: tuple[str, ...] = ()
    #: The small print of a cell stands below its text, which makes room for more columns.
    stacked: bool = False

    def head(self) -> list[tuple[str, int]]:
        """Headings over several columns, with their width; empty if there are none."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and column.group and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(group for group, _ in spans) else []


MISSING = Cell()


def number(value: object, form: str = "{:.2f}", *, note: str = "", best: bool = False) -> Cell:
    """A cell for a number; missing if it is None or not finite."""
    known = finite(value)
    return MISSING if known is None else Cell(form.format(known), known, note=note, best=best)


def words(text: object, *, note: str = "", code: bool = False) -> Cell:
    """A cell for text, which sorts without regard to case."""
    return Cell(str(text), str(text).lower(), note=note, code=code) if str(text) else MISSING


def lra_table(settings: Sequence[Setting]) -> Table:
    """The paper's LRA and Image tables with the figures of these runs beside them."""
    tasks = (*LRA_TASKS, "image")
    columns = [Column("model", numeric=False), Column("cost", numeric=False, hint="in the length L of the sequence")]
    for task in tasks:
        columns += [Column("paper", "paper", task_title(task)), Column("here", "here", task_title(task))]
    hint = "average of ListOps, Text and Retrieval"
    columns += [
        Column("paper", "paper", "Average of first 3", hint=hint),
        Column("here", "here", "Average of first 3", hint=hint),
    ]
    best_printed = {task: max(row.accuracy(task) or 0.0 for row in LRA) for task in tasks}
    best_average = max(row.row_average() for row in LRA)
    rows: list[tuple[Cell, ...]] = [_lra_row(RANDOM, "", {}, best_printed, best_average)]
    labels = {group.attention for setting in settings if setting.task_name in tasks for group in setting.groups}
    known = {row.attention: row for row in LRA}
    for attention in sorted(labels | {row.attention for row in LRA if row.attention}, key=attention_order):
        paper = known.get(attention)
        found = _lra_cells(attention, [setting for setting in settings if setting.task_name in tasks])
        for position, here in enumerate(found or [{}]):
            rows.append(_lra_row(paper if position == 0 else None, attention, here, best_printed, best_average))
    return Table("lra", "Long Range Arena: test accuracy, %", tuple(columns), tuple(rows))


def _lra_cells(attention: str, settings: Sequence[Setting]) -> list[dict[str, tuple[Setting, Group]]]:
    """What these runs have for an attention: one row a preset, more if a task was run with several settings of it."""
    rows: list[dict[str, tuple[Setting, Group]]] = []
    presets: list[str] = []
    for setting in settings:
        group = setting.group(attention)
        if group is None:
            continue
        for row, preset in zip(rows, presets, strict=True):
            if preset == setting.preset and setting.task_name not in row:
                row[setting.task_name] = (setting, group)
                break
        else:
            rows.append({setting.task_name: (setting, group)})
            presets.append(setting.preset)
    return rows


def _lra_row(
    paper: LraRow | None,
    attention: str,
    here: Mapping[str, tuple[Setting, Group]],
    best_printed: Mapping[str, float],
    best_average: float,
) -> tuple[Cell, ...]:
    if paper is None:
        name = Cell(attention, attention.lower(), note="not in the paper" if ":" in attention else "", code=True)
    else:
        name = Cell(paper.model, paper.model.lower(), note=attention)
    cells = [name, words(paper.complexity if paper is not None else "")]
    for task in (*LRA_TASKS, "image"):
        printed = paper.accuracy(task) if paper is not None else None
        cells.append(number(printed, best=printed == best_printed[task]))
        cells.append(accuracy_cell(*here[task]) if task in here else MISSING)
    if paper is None:
        cells.append(MISSING)
    else:
        average = paper.row_average()
        note = f"printed {paper.average:.2f}" if paper.average_is_misprinted() else ""
        cells.append(number(average, note=note, best=average == best_average))
    own = [here[task] for task in LRA_TASKS if task in here]
    whole = [accuracy for _, group in own if (accuracy := group.accuracy()) is not None]
    letters = ", ".join(setting.letter for setting, _ in own)
    cells.append(number(fmean(whole), note=letters) if len(whole) == len(LRA_TASKS) else MISSING)
    return tuple(cells)


def accuracy_cell(setting: Setting, group: Group) -> Cell:
    """Accuracy with its setting; a run that is not finished says so."""
    accuracy = group.accuracy()
    if accuracy is None:
        missing = _no_accuracy(group)
        return replace(missing, note=", ".join(filter(None, (setting.letter, missing.note))))
    return Cell(f"{accuracy:.2f}", accuracy, note=setting.letter, best=setting.is_best(group))


def _no_accuracy(group: Group) -> Cell:
    """Why there is no accuracy: the runs go on, or ended with one that is no number."""
    return Cell(note="not a number") if group.finished else Cell("unfinished")


def setting_table(setting: Setting) -> Table:
    """All attentions of one setting."""
    paper = {row.attention: row.accuracy(setting.task_name) for row in LRA}
    has_paper = any(paper.get(group.attention) is not None for group in setting.groups)
    accuracy, cost = "accuracy, %", "cost"
    spread = "standard deviation of the test accuracy over seeds, or over draws of the frequencies if there is one seed"
    columns = [
        Column("attention", numeric=False),
        Column("runs", hint="finished runs, with the number of seeds if some have the same"),
        Column("test", "here", accuracy, hint="on the test set, averaged over draws of the frequencies and over seeds"),
        Column("±", "here", accuracy, hint=spread),
        Column("vote", "here", accuracy, hint="of the majority vote over draws of the frequencies"),
        Column("validation", "here", accuracy, hint="best on the validation set so far, also of unfinished runs"),
        Column("best step", "here", hint="step of the weights that were tested"),
        Column("tokens/s", "here", cost, hint="median speed of training; other work on the machine shows in it"),
        Column("minutes", "here", cost, hint="wall time of training, pauses included"),
        Column("peak MiB", "here", cost, hint="peak memory of the whole process, with Python, torch and the data"),
        Column("parameters", "here", cost),
    ]
    if has_paper:
        columns.insert(2, Column("paper", "paper", accuracy, hint="as printed in the paper, at its own budget"))
    rows = []
    unranked = [group for group in setting.groups if group.accuracy() is None]
    for group in [*(group for group, _ in setting.ranked()), *unranked]:
        row = _setting_row(group, best=setting.is_best(group))
        if has_paper:
            row.insert(2, number(paper.get(group.attention)))
        rows.append(tuple(row))
    return Table(f"setting-{setting.letter}", "Attentions, best first", tuple(columns), tuple(rows))


def _setting_row(group: Group, *, best: bool) -> list[Cell]:
    spread, vote = group.spread(), group.test("voting_accuracy")
    seconds, memory = group.number("train_seconds"), group.number("peak_memory_bytes")
    finished, total = len(group.finished), len(group.runs)
    accuracy = group.accuracy()
    return [
        words(group.attention, code=True),
        Cell(
            str(finished) if finished == total else f"{finished} of {total}",
            finished,
            note="" if group.seeds == finished else count(group.seeds, "seed"),
        ),
        _no_accuracy(group) if accuracy is None else Cell(f"{accuracy:.2f}", accuracy, best=best),
        MISSING if spread is None else Cell(f"{spread[0]:.2f}", spread[0], note=spread[1]),
        number(None if vote is None else 100 * vote),
        number(group.best_validation()),
        number(group.number("best_step"), "{:,.0f}"),
        number(group.speed(), "{:,.0f}"),
        number(None if seconds is None else seconds / 60, "{:.1f}"),
        number(None if memory is None else memory / MEBIBYTE, "{:,.0f}"),
        number(group.number("parameters"), "{:,.0f}"),
    ]


def variance_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The measures of variance of all runs."""
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
            *(number(_percent(row.get(key))) for key in ("voting_accuracy", "accuracy")),
        )
        for row in rows
    )
    return Table("variance", "Variance of predictions over draws of the frequencies", columns, cells)


def eigenvalue_table(analyses: Sequence[Analysis], runs: Sequence[Run]) -> Table:
    """The paper's summary of the eigenvalues, and the same of these runs with their initial values."""
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
    return Table("eigenvalues", "Eigenvalues of the covariance of the frequencies", columns, tuple(rows))


def _beside_printed(value: float, printed: float) -> Cell:
    """A figure of the paper's tables by heads, with what its summary prints if that looks different."""
    shown, summary = f"{value:.3f}", f"{printed:.3f}"
    return Cell(shown, value, note="" if shown == summary else f"printed {summary}")


def eigenvalue_head_tables(analyses: Sequence[Analysis]) -> list[Table]:
    """Eigenvalues by layer and head: these runs', then the paper's."""
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
        tables.append(Table(f"heads-{position}", f"Here: {run}", columns, rows))
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
        tables.append(Table(f"paper-heads-{position}", f"The paper: {paper.table}", paper_columns, paper_rows))
    return tables


def glue_table(settings: Sequence[Setting]) -> Table:
    """The paper's GLUE table, with these runs beside it if there are any."""
    ours = [setting for setting in settings if glue_task(setting.task) is not None]
    columns = [Column("model", numeric=False)]
    for title, metric, _ in GLUE_COLUMNS:
        heading = f"{title} {METRIC_TITLES[metric]}"
        columns += [Column("paper", "paper", heading)] + ([Column("here", "here", heading)] if ours else [])
    models = {row.attention: row.model for row in LRA}
    labels = {group.attention for setting in ours for group in setting.groups} | set(GLUE)
    rows = []
    for attention in sorted(labels, key=attention_order):
        row = [
            Cell(models[attention], models[attention].lower(), note=attention)
            if attention in models
            else words(attention, code=True)
        ]
        for position, (_, metric, task) in enumerate(GLUE_COLUMNS):
            row.append(number(GLUE[attention][position] if attention in GLUE else None))
            if ours:
                row.append(_glue_cell(attention, task, metric, ours))
        rows.append(tuple(row))
    return Table("glue", "GLUE", tuple(columns), tuple(rows))


def glue_task(task: str) -> str | None:
    """The GLUE task that a run's task is, whether it is called "sst2", "sst-2" or "glue-sst2"."""
    name = re.sub(r"^glue[-_/:. ]?", "", task.lower())
    known = {column[2] for column in GLUE_COLUMNS}
    return next((candidate for candidate in (name, name.replace("-", "")) if candidate in known), None)


def _glue_cell(attention: str, task: str, metric: str, settings: Sequence[Setting]) -> Cell:
    for setting in settings:
        group = setting.group(attention)
        if glue_task(setting.task) != task or group is None:
            continue
        for name in METRIC_NAMES[metric]:
            value = group.test(name)
            if value is not None:
                return number(value, note=setting.letter)
    return MISSING


def _by_run(analyses: Sequence[Analysis]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Names of runs with their rows; runs of two analyses may have the same name."""
    by_run: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for number, analysis in enumerate(analyses):
        for row in analysis.rows:
            by_run.setdefault((number, str(row["run"])), []).append(row)
    return [(name, rows) for (_, name), rows in by_run.items()]


def _task_of(name: str, runs: Sequence[Run]) -> str:
    """The task of the runs with this name, nothing if they have several."""
    tasks = {run.task for run in runs if run.name == name}
    return tasks.pop() if len(tasks) == 1 else ""


def _over(rows: Sequence[Mapping[str, Any]], key: str, summary: Any) -> float | None:
    values = [value for row in rows if (value := finite(row.get(key))) is not None]
    return summary(values) if values else None


def _percent(value: object) -> float | None:
    known = finite(value)
    return None if known is None else 100 * known
