"""Cells of tables: means with their errors, paired differences, and which of them are significant."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from klformer.lab.analysis.seeds import standard_error
from klformer.lab.tables import Cell, Column, Table

Row = Mapping[str, Any]

#: A difference is marked where it is more than so many standard errors, of at least so many pairs.
_ERRORS, _PAIRS = 2, 3


def with_spread(value: float | None, spread: float | None, *, sign: bool = False) -> str:
    """Write a number with its deviation or standard error; two decimals where more would say nothing."""
    if value is None:
        return ""
    digits = 2 if abs(value) >= 1 or (spread or 0) >= 0.05 else 4
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text if spread is None else f"{text} +- {spread:.{digits}f}"


def mean_and_error(values: Sequence[float]) -> str:
    """Write the mean of some values with its standard error."""
    return with_spread(statistics.fmean(values), standard_error(values))


def values_by_attention(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return the values of every attention by seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["attention"], {})[row["seed"]] = row["value"]
    return found


def values_by_setting(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, float]]]:
    """Return the same for every setting, in the order in which they come."""
    settings = dict.fromkeys(row["setting"] for row in rows)
    return {name: values_by_attention([row for row in rows if row["setting"] == name]) for name in settings}


def paired(values: Mapping[int, float], others: Mapping[int, float]) -> tuple[float | None, float | None, int]:
    """Return the mean difference of pairs of one seed, its standard error, and how many they are."""
    differences = [value - others[seed] for seed, value in values.items() if seed in others]
    mean = statistics.fmean(differences) if differences else None
    return mean, standard_error(differences), len(differences)


def difference(mean: float | None, error: float | None, pairs: int) -> str:
    """Return a mean difference with its standard error, bold where it is significant."""
    text = with_spread(mean, error, sign=True)
    return f"**{text}**" if is_beyond(mean, error, pairs) else text


def is_beyond(mean: float | None, error: float | None, pairs: int) -> bool:
    """Return whether a difference is significant."""
    return pairs >= _PAIRS and (error or 0) * _ERRORS < abs(mean or 0)


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = tuple(tuple(Cell(cell, cell) for cell in line) for line in lines)
    return Table("", tuple(map(Column, headings)), rows).as_markdown()
