"""Tables as commands print them: a page names the function that makes one of rows, as `module:function`.

    <!-- table klformer.lab.bench.ops:operator_table research/data/efficiency.json setting=operators show=L,kernel -->

show= takes some of its columns, and without= leaves some out.
"""

from collections.abc import Sequence
from importlib import import_module

from klformer.errors import ArgumentError
from klformer.lab.analysis.cells import Row
from klformer.lab.tables import Table, number, percent, words
from klformer.memory import MEBIBYTE

#: Whose functions a page may name.
_PACKAGES = ("klformer", "benchmarks", "research")


def printed(name: str, rows: Sequence[Row], show: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """Return what a function makes of rows: a table, or rows to be shown as they are.

    Raises:
        ArgumentError: there is no such function, or no such column.
    """
    module, _, function = name.partition(":")
    if module.split(".")[0] not in _PACKAGES:
        raise ArgumentError(f"a function of a table must be in one of {', '.join(_PACKAGES)}; got {name}")
    try:
        made = getattr(import_module(module), function)([dict(row) for row in rows])
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"there is no function {name}: {error}") from error
    table = made if isinstance(made, Table) else Table.of(made)
    return table.with_columns(
        show or [column.title for column in table.columns if column.title not in without]
    ).as_markdown()


def profiles(rows: Sequence[Row]) -> Table:
    """Return a line for each training step that `klformer profile` looked at."""
    several = len({row.get("task") for row in rows}) > 1
    lines = [
        ({"task": words(row["task"])} if several else {})
        | {
            "attention": words(row["attention"], code=True),
            "a step": number(row["seconds"], "{:.2f} s"),
            "of it in the attention product": percent(row["attention_seconds"] / row["seconds"], "{:.0f}%"),
            "MiB above the model": number(row["peak_bytes"] / MEBIBYTE, "{:,.0f}"),
        }
        for row in rows
    ]
    return Table.of(lines)
