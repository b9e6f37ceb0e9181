"""The tables of runs: one a setting, and the paper's LRA and GLUE tables with these runs beside them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from klformer.lab.report.paper_numbers import GLUE, GLUE_CELLS, LRA, LRA_TASKS, PAPER_TASKS, RANDOM, GlueCell, LraRow
from klformer.lab.report.run import ACCURACY, PRETRAINED
from klformer.lab.report.settings import Group, Setting, attention_order, count, learning_rate
from klformer.lab.tables import MISSING, Cell, Column, Table, number, percent, words
from klformer.lab.training.metrics import Metric
from klformer.memory import MEBIBYTE

#: A larger table is not read on a page; `klformer eval` prints it.
MOST_CLASSES = 20


def confusion_table(setting: Setting) -> Table | None:
    """Tabulate the confusions of the best attention, its seeds added up; None where there are no classes, or too many
    of them."""
    ranked = setting.ranked()
    if not ranked:
        return None
    best = ranked[0][0]
    found = [run.result.confusion for run in best.finished if run.result is not None and run.result.confusion]
    size = len(found[0]) if found else 0
    if not 2 <= size <= MOST_CLASSES or any(len(one) != size for one in found):
        return None
    sums = [[sum(one[row][column] for one in found) for column in range(size)] for row in range(size)]
    names = list(setting.task.classes) if len(setting.task.classes) == size else [str(index) for index in range(size)]
    columns = (Column("class", numeric=False), *(Column(name, "here", "answer") for name in names))
    rows: list[tuple[Cell, ...]] = []
    for index, name in enumerate(names):
        counts = (number(count, "{:,.0f}", best=column == index) for column, count in enumerate(sums[index]))
        rows.append((words(name), *counts))
    runs = "" if len(found) == 1 else f", {len(found)} runs added up"
    title = f"What {best.attention} takes for what: test examples by class and answer{runs}"
    return Table(title, columns, tuple(rows), name=f"confusion-{setting.letter}")


#: What runs may call the metrics of the GLUE table.
METRIC_NAMES = {
    "accuracy": ("accuracy",),
    "f1": ("f1",),
    "matthews": ("matthews", "matthews_correlation", "mcc"),
}
METRIC_TITLES = {"accuracy": "acc", "f1": "F1", "matthews": "MCC"}
#: What runs of classes have besides, by its name in results: heading, the scores it stands with, and what it is.
EXTRAS = {
    "voting_accuracy": ("vote", ACCURACY.label, "accuracy of the majority vote over draws of the frequencies"),
    "macro_f1": ("F1", "classes, %", "mean of the F1 of all classes, with the mean probabilities of the draws"),
    "calibration_error": (
        "calibration",
        "classes, %",
        "expected calibration error: how far probabilities are from how often they are right",
    ),
}


def lra_table(settings: Sequence[Setting]) -> Table:
    """Tabulate the paper's LRA and Image results with the figures of these runs beside them."""
    columns = [Column("model", numeric=False), Column("cost", numeric=False, hint="in the length L of the sequence")]
    for title in PAPER_TASKS.values():
        columns += [Column("paper", "paper", title), Column("here", "here", title)]
    hint = "average of ListOps, Text and Retrieval"
    columns += [
        Column("paper", "paper", "Average of first 3", hint=hint),
        Column("here", "here", "Average of first 3", hint=hint),
    ]
    best_printed = {task: max(row.accuracy(task) or 0.0 for row in LRA) for task in PAPER_TASKS}
    best_average = max(row.row_average() for row in LRA)
    rows: list[tuple[Cell, ...]] = [_lra_row(RANDOM, "", {}, best_printed, best_average)]
    ours = [setting for setting in settings if setting.paper_task is not None]
    labels = {group.attention for setting in ours for group in setting.groups}
    known = {row.attention: row for row in LRA}
    for attention in sorted(labels | {row.attention for row in LRA if row.attention}, key=attention_order):
        paper = known.get(attention)
        found = _lra_cells(attention, ours)
        for position, here in enumerate(found or [{}]):
            rows.append(_lra_row(paper if position == 0 else None, attention, here, best_printed, best_average))
    return Table("Long Range Arena: test accuracy, %", tuple(columns), tuple(rows), name="lra")


def _lra_cells(attention: str, settings: Sequence[Setting]) -> list[dict[str, tuple[Setting, Group]]]:
    """Return what these runs have for an attention: one row a preset, more if a task was run with several settings of
    it."""
    rows: list[dict[str, tuple[Setting, Group]]] = []
    presets: list[str] = []
    for setting in settings:
        group = setting.group(attention)
        if group is None:
            continue
        for row, preset in zip(rows, presets, strict=True):
            if preset == setting.preset and setting.task.name not in row:
                row[setting.task.name] = (setting, group)
                break
        else:
            rows.append({setting.task.name: (setting, group)})
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
    for task in PAPER_TASKS:
        printed = paper.accuracy(task) if paper is not None else None
        cells.append(number(printed, best=printed == best_printed[task]))
        cells.append(score_cell(*here[task]) if task in here else MISSING)
    if paper is None:
        cells.append(MISSING)
    else:
        average = paper.row_average()
        note = f"printed {paper.average:.2f}" if paper.average_is_misprinted() else ""
        cells.append(number(average, note=note, best=average == best_average))
    own = [here[task] for task in LRA_TASKS if task in here]
    whole = [score for _, group in own if (score := group.score()) is not None]
    letters = ", ".join(setting.letter for setting, _ in own)
    cells.append(number(fmean(whole), note=letters) if len(whole) == len(LRA_TASKS) else MISSING)
    return tuple(cells)


def score_cell(setting: Setting, group: Group) -> Cell:
    """Return the score with its setting; a run that is not finished says so."""
    score = group.score()
    if score is None:
        missing = _no_score(group)
        return replace(missing, note=", ".join(filter(None, (setting.letter, missing.note))))
    return Cell(setting.metric.show_scaled(score), score, note=setting.letter, best=setting.is_best(group))


def _no_score(group: Group) -> Cell:
    """Return why there is no score: the runs go on, or ended with one that is no number."""
    return Cell(note="not a number") if group.finished else Cell("unfinished")


def setting_table(setting: Setting) -> Table:
    """Tabulate all attentions of one setting; with the paper's figures, votes, F1 and calibration, where there are
    any."""
    task, metric = setting.paper_task, setting.metric
    paper = {row.attention: row.accuracy(task) for row in LRA} if task is not None else {}
    has_paper = any(paper.get(group.attention) is not None for group in setting.groups)
    extras = [name for name in EXTRAS if any(group.test(name) is not None for group in setting.groups)]
    rows = []
    unranked = [group for group in setting.groups if group.score() is None]
    for group in [*(group for group, _ in setting.ranked()), *unranked]:
        printed = [number(paper.get(group.attention))] if has_paper else []
        more = [percent(group.test(name)) for name in extras]
        rows.append((*_runs_of(group), *printed, *_scores(group, more, best=setting.is_best(group)), *_costs(group)))
    columns = _setting_columns(metric, has_paper=has_paper, extras=extras)
    return Table("Attentions, best first", columns, tuple(rows), name=f"setting-{setting.letter}")


def rates_table(setting: Setting) -> Table | None:
    """Tabulate the learning rates that were tried, attention by attention; None where there was no choice."""
    if not setting.tried:
        return None
    metric, score = setting.metric, setting.metric.label
    columns = (
        Column("attention", numeric=False),
        Column("learning rate", "here"),
        Column("runs", "here"),
        Column("validation", "here", score, hint="with the weights that were tested; the first seed chooses by it"),
        Column("test", "here", score),
    )
    rows = []
    for group in setting.tried:
        shown = setting.group(group.attention)
        chosen = shown is not None and group.runs[0] in shown.runs
        rate, validation, test = learning_rate(group.runs[0]), group.validation(), group.score()
        rows.append(
            (
                *(words(group.attention, code=True), Cell(f"{rate:g}", rate, note="chosen" if chosen else "")),
                Cell(str(len(group.finished)), len(group.finished)),
                *(MISSING if one is None else Cell(metric.show_scaled(one), one) for one in (validation, test)),
            )
        )
    return Table("Learning rates that were tried", columns, tuple(rows), name=f"rates-{setting.letter}")


def _setting_columns(metric: Metric, *, has_paper: bool, extras: Sequence[str]) -> tuple[Column, ...]:
    score, cost = metric.label, "cost"
    spread = (
        f"standard deviation of the test {metric.name} over seeds, "
        "or over draws of the frequencies if there is one seed"
    )
    return (
        Column("attention", numeric=False),
        Column("runs", hint="finished runs, with the number of seeds if some have the same"),
        *([Column("paper", "paper", score, hint="as printed in the paper, at its own budget")] if has_paper else []),
        Column("test", "here", score, hint="on the test set, averaged over draws of the frequencies and over seeds"),
        Column("±", "here", score, hint=spread),
        *(Column(title, "here", scores, hint=hint) for title, scores, hint in map(EXTRAS.__getitem__, extras)),
        Column("validation", "here", score, hint="best on the validation set so far, also of unfinished runs"),
        Column("best step", "here", hint="step of the weights that were tested"),
        Column("frequencies moved", "here", hint="relative change of the frequencies since the start, equal noise"),
        Column("kernel moved", "here", hint="relative change of the kernel since the start, under equal noise"),
        Column("tokens/s", "here", cost, hint="median speed of training; other work on the machine shows in it"),
        Column("minutes", "here", cost, hint="wall time of training, pauses included"),
        Column("peak MiB", "here", cost, hint="peak memory of the whole process, with Python, torch and the data"),
        Column("parameters", "here", cost),
    )


def _runs_of(group: Group) -> tuple[Cell, Cell]:
    """Return the attention, and how many runs of it there are."""
    finished, total = len(group.finished), len(group.runs)
    text = str(finished) if finished == total else f"{finished} of {total}"
    note = "" if group.seeds == finished else count(group.seeds, "seed")
    return words(group.attention, code=True), Cell(text, finished, note=note)


def _scores(group: Group, votes: Sequence[Cell], *, best: bool) -> tuple[Cell, ...]:
    score, spread, validation = group.score(), group.spread(), group.best_validation()
    show = group.metric.show_scaled
    return (
        _no_score(group) if score is None else Cell(show(score), score, best=best),
        MISSING if spread is None else Cell(show(spread[0]), spread[0], note=spread[1]),
        *votes,
        MISSING if validation is None else Cell(show(validation), validation),
    )


def _costs(group: Group) -> tuple[Cell, ...]:
    seconds, memory = group.number("train_seconds"), group.number("peak_memory_bytes")
    return (
        number(group.number("best_step"), "{:,.0f}"),
        number(group.number("kernel_frequencies_moved"), "{:.2f}"),
        number(group.number("kernel_moved"), "{:.2f}"),
        number(group.speed(), "{:,.0f}"),
        number(None if seconds is None else seconds / 60, "{:.1f}"),
        number(None if memory is None else memory / MEBIBYTE, "{:,.0f}"),
        number(group.number("parameters"), "{:,.0f}"),
    )


def glue_table(settings: Sequence[Setting]) -> Table:
    """Tabulate the paper's GLUE results, with these runs beside them if there are any."""
    ours = [setting for setting in settings if glue_task(setting.task.name) is not None]
    columns = [Column("model", numeric=False)]
    for (_, metric, _), title in GLUE_CELLS.items():
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
        for position, cell in enumerate(GLUE_CELLS):
            paper = GLUE.get(attention.removesuffix(f":{PRETRAINED}"))
            row.append(number(None if paper is None else paper[position]))
            if ours:
                row.append(_glue_cell(attention, cell, ours))
        rows.append(tuple(row))
    return Table("GLUE", tuple(columns), tuple(rows), name="glue")


def glue_task(task: str) -> str | None:
    """Return the GLUE task that a run's task is, whether it is called "sst2", "sst-2" or "glue-sst2"."""
    name = re.sub(r"^glue[-_/:. ]?", "", task.lower())
    known = {task for task, _, _ in GLUE_CELLS}
    return next((candidate for candidate in (name, name.replace("-", "")) if candidate in known), None)


def _glue_cell(attention: str, cell: GlueCell, settings: Sequence[Setting]) -> Cell:
    wanted, metric, part = cell
    prefix = "" if part == "test" else f"{part}_"
    tried = []
    for setting in settings:
        group = setting.group(attention)
        if glue_task(setting.task.name) != wanted or group is None:
            continue
        values = [group.test(f"{prefix}{name}") for name in METRIC_NAMES[metric]]
        if known := [value for value in values if value is not None]:
            validation = group.best_validation()
            rank = -math.inf if validation is None else setting.metric.rank(validation)
            tried.append((rank, known[0], setting.letter))
    if not tried:
        return MISSING
    # Of several settings the one that is best on validation.
    _, value, letter = max(tried, key=lambda one: one[0])
    return number(value, note=letter)
