"""Tables: one type, three printers."""

from io import StringIO

import pytest
from rich.console import Console

from klformer.errors import ArgumentError
from klformer.lab.tables import MISSING, Cell, Column, Table, as_cell, finite, interval, number, percent, words


def printed(table):
    file = StringIO()
    table.print(Console(file=file, width=60))
    return file.getvalue()


def test_columns_without_a_value_are_left_out_and_numbers_are_on_the_right():
    table = Table.of([{"a": "x", "b": None, "c": 1}, {"a": "y", "b": MISSING, "c": None}], "title")
    assert [(column.title, column.numeric) for column in table.columns] == [("a", False), ("c", True)]
    assert [column.justify for column in table.as_text().columns] == ["left", "right"]
    assert Table.of([]).rows == ()


def test_the_terminal_and_markdown_show_the_same_cells():
    line = {
        "attention": words("softmax", code=True),
        "ms": interval({"median": 2, "low": 1, "high": 4}, "{:.1f}"),
        "note": "[red]x\x1b[2J",
    }
    table = Table.of(
        [line, {"attention": words("gmm-rks", code=True, note="a"), "ms": None, "note": words("y", note="z")}],
        notes=["below"],
    )
    assert table.as_markdown().splitlines() == [
        "| attention | ms | note |",
        "|---|---|---|",
        "| `softmax` | 2.0 (1.0 to 4.0) | [red]x\x1b[2J |",
        "| `gmm-rks` (a) |  | y (z) |",
    ]
    text = printed(table)
    for part in ("softmax", "2.0 (1.0 to 4.0)", r"[red]x\x1b[2J", "y (z)", "below"):
        assert part in text
    assert table.with_columns(["note", "ms"]).as_markdown().startswith("| note | ms |")
    with pytest.raises(ArgumentError, match=r"columns must be some of attention, ms, note; got other"):
        table.with_columns(["other"])


def test_headings_over_several_columns():
    columns = (Column("task", numeric=False), Column("paper", "paper", "text"), Column("here", "here", "text"))
    assert Table("", columns, ()).head() == [("", 1), ("text", 2)]
    assert Table("", columns[:1], ()).head() == []


@pytest.mark.parametrize("value", [None, "7", float("nan"), float("inf"), True, 10**400, {}])
def test_what_is_no_number_is_missing(value):
    assert finite(value) is None
    assert number(value) == percent(value) == interval({"median": value}) == MISSING


def test_cells_of_plain_values():
    assert as_cell(0.123456) == Cell("0.1235", 0.123456)
    assert as_cell(12345) == Cell("12345", 12345)
    assert as_cell("Text") == Cell("Text", "text")
    assert as_cell(True).text == "True"
    assert as_cell("") == as_cell(None) == MISSING
    assert percent(0.5, "{:.0f}%") == Cell("50%", 50)
    assert interval({"median": 2, "low": 2, "high": 2}, "{:.0f}", 10) == Cell("20", 20)
