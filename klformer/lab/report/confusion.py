"""Which classes the best attention of a setting takes for which."""

from klformer.lab.report.settings import Setting
from klformer.lab.tables import Cell, Column, Table, number, words

#: A larger table is not read on a page; `klformer eval` prints it.
MOST_CLASSES = 20


def confusion_table(setting: Setting) -> Table | None:
    """Of the best attention, its seeds added up; None where there are no classes, or too many of them."""
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
