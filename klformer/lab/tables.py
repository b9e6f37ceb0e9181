"""Tables: columns, and cells with a text to show and a value to sort by. One type, for the terminal, Markdown and HTML.

The terminal and Markdown are printed here, HTML by the template of the report. A benchmark or an analysis makes its
tables of the rows that it wrote, and everybody shows those.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from klformer.errors import ArgumentError
from klformer.lab.terminal import harmless

#: Whose figure it is: printed in the paper, or measured here.
Source = Literal["", "paper", "here"]


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
    """A text, and the value that it is sorted by; a cell without a value is missing."""

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

    def plain(self) -> str:
        """Return the text with the small print in brackets; empty if both are missing."""
        text = "" if self == MISSING else self.text
        return f"{text} ({self.note})" if self.note and text else text or self.note


MISSING = Cell()


def finite(value: object) -> float | None:
    """Return a finite number as it is, and None for anything else, which tables show as missing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def number(value: object, form: str = "{:.2f}", *, note: str = "", best: bool = False) -> Cell:
    """Return a cell for a number; missing if it is None or not finite."""
    known = finite(value)
    return MISSING if known is None else Cell(form.format(known), known, note=note, best=best)


def words(text: object, *, note: str = "", code: bool = False) -> Cell:
    """Return a cell for text, which sorts without regard to case."""
    return Cell(str(text), str(text).lower(), note=note, code=code) if str(text) else MISSING


def percent(share: object, form: str = "{:.2f}") -> Cell:
    """Return a cell for a share between 0 and 1, in percent."""
    known = finite(share)
    return number(None if known is None else 100 * known, form)


def interval(values: object, form: str = "{:.2f}", scale: float = 1) -> Cell:
    """Return a cell for a median, with the lowest and the highest as small print where they differ."""
    known = values if isinstance(values, Mapping) else {}
    median, low, high = (finite(known.get(key)) for key in ("median", "low", "high"))
    if median is None:
        return MISSING
    ends = [form.format(end * scale) for end in (low, high) if end is not None]
    note = " to ".join(ends) if len(set(ends)) == 2 else ""
    return Cell(form.format(median * scale), median * scale, note=note)


def as_cell(value: object) -> Cell:
    """Return a cell for any value: numbers with four significant digits."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, float):
        return number(value, "{:.4g}")
    if isinstance(value, int) and not isinstance(value, bool):
        return Cell(str(value), value)
    return MISSING if value is None else words(value)


@dataclass(frozen=True)
class Table:
    """A table with its title."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    #: Small print below it.
    notes: tuple[str, ...] = ()
    #: The small print of a cell stands below its text, which makes room for more columns.
    stacked: bool = False
    #: What a page calls it in links.
    name: str = ""

    @classmethod
    def of(
        cls,
        lines: Sequence[Mapping[str, object]],
        title: str = "",
        *,
        notes: Sequence[str] = (),
        hints: Mapping[str, str] | None = None,
    ) -> "Table":
        """Make a table of lines with the same headings; columns without a single value are left out.

        Args:
            lines: Cells or plain values by heading.
            hints: What a column shows, by its heading.
        """
        cells = {heading: [as_cell(line[heading]) for line in lines] for heading in (lines[0] if lines else ())}
        shown = {heading: column for heading, column in cells.items() if any(cell.plain() for cell in column)}
        columns = []
        for heading, column in shown.items():
            numeric = not any(isinstance(cell.sort, str) for cell in column)
            columns.append(Column(heading, numeric=numeric, hint=(hints or {}).get(heading, "")))
        return cls(title, tuple(columns), tuple(zip(*shown.values(), strict=True)), tuple(notes))

    def head(self) -> list[tuple[str, int]]:
        """Return headings over several columns, with their width; empty if there are none."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and column.group and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(group for group, _ in spans) else []

    def with_columns(self, headings: Sequence[str]) -> "Table":
        """Return the table with these columns alone, in this order."""
        known = [column.title for column in self.columns]
        if strange := [heading for heading in headings if heading not in known]:
            raise ArgumentError(f"columns must be some of {', '.join(known)}; got {', '.join(strange)}")
        places = [known.index(heading) for heading in headings]
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in places), rows=rows)

    def as_text(self) -> TextTable:
        """Return the grid for the terminal: columns of numbers are aligned to the right, the paper's rows are dim."""
        text = TextTable()
        for column in self.columns:
            justify: Literal["right", "left"] = "right" if column.numeric else "left"
            # Words are folded, not cut: names of runs differ at their ends.
            text.add_column(Text(harmless(column.title)), justify=justify, no_wrap=column.numeric, overflow="fold")
        for row in self.rows:
            style = "dim" if row[0].source == "paper" else None
            texts = (
                cell.plain() or ("-" if column.numeric else "") for cell, column in zip(row, self.columns, strict=True)
            )
            text.add_row(*(Text(harmless(shown)) for shown in texts), style=style)
        return text

    def print(self, console: Console) -> None:
        """Print the table on the terminal, between its title and its notes, which go beyond a narrow one."""
        if self.title:
            console.print(f"\n{self.title}", style="bold", highlight=False, markup=False)
        console.print(self.as_text())
        hints = [f"{column.title}: {column.hint}" for column in self.columns if column.hint]
        for text in (*self.notes, *hints):
            console.print(text, highlight=False, markup=False)

    def as_markdown(self) -> str:
        """Return the table in Markdown, without title and notes."""

        def line(cells: Sequence[str]) -> str:
            return f"| {' | '.join(cells)} |"

        def show(cell: Cell) -> str:
            return replace(cell, text=f"`{cell.text}`").plain() if cell.code else cell.plain()

        lines = [line([column.title for column in self.columns]), "|---" * len(self.columns) + "|"]
        lines += [line([show(cell) for cell in row]) for row in self.rows]
        return "\n".join(lines)


#: What makes a table of a benchmark's rows.
Tabulate = Callable[[Sequence[Mapping[str, Any]]], Table]
