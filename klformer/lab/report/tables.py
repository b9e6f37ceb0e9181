"""What the tables of a report are made of: columns, and cells with the text to show and the value to sort by."""

from dataclasses import dataclass
from typing import Literal

from klformer.lab.report.reading import finite

#: Whose figure it is: printed in the paper, or from the runs of this report.
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


def percent(share: object) -> Cell:
    """A cell for a share between 0 and 1, in percent."""
    known = finite(share)
    return number(None if known is None else 100 * known)
