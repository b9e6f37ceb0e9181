"""Tables whose columns a page chooses: fields of the data, and what they differ by.

A field to show is field:heading, or field alone. `after-before` in the place of a field is the difference of two fields
of one row.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from klformer.errors import ArgumentError
from klformer.lab.analysis.cells import Row, is_beyond, markdown, paired
from klformer.lab.analysis.seeds import over_seeds


def means(rows: Sequence[Row], by: Sequence[str], show: Sequence[str], within: Sequence[str] = ()) -> str:
    """Columns of the data, means over seeds with their standard errors, and of how many values they are: one number,
    or the smallest and the largest where columns differ. Differences have their sign, and are bold where they are more
    than chance.

    Args:
        by: The fields that a row of the table has in common, which are its first columns.
        show: The fields to average.
        within: The fields that rows of one run have in common, such as its seed, if a run has several rows, such as
            one a head. They are averaged first: a run is one value.
    """
    headings = _headings(show)
    rows = [_with_differences(row, headings) for row in rows]
    if within:
        rows = over_seeds(rows, by=[*by, *within], values=list(headings))
    lines = []
    for row in over_seeds(rows, by=by, values=list(headings)):
        counts = [row[f"{field}_count"] for field in headings]
        cells = [
            _marked(row[field], row[f"{field}_error"], row[f"{field}_count"])
            if "-" in field
            else _significant(row[field], row[f"{field}_error"])
            for field in headings
        ]
        lines.append([*_known(row, by), _span(counts), *cells])
    return markdown([*by, "values", *headings.values()], lines)


def differences(
    rows: Sequence[Row],
    show: Sequence[str],
    of: Sequence[str],
    minus: Sequence[str],
    by: Sequence[str] = (),
    between: Sequence[str] = ("attention",),
    across: Sequence[str] = (),
) -> str:
    """Mean differences of pairs of one seed with their standard errors, and how many pairs there are; bold where they
    are more than chance.

    Args:
        show: The fields to take the differences of, a column each.
        of: What the field `between` is in the first of a pair; several give a row each.
        minus: What it is in the second, as many.
        by: The fields that both have in common, which are the first columns.
        between: The field in which they differ.
        across: A field whose values are columns, of the one field that is shown.

    Raises:
        ArgumentError: there are not as many of one as of the other, several fields to differ in, or to show across.
    """
    if len(of) != len(minus) or len(between) != 1:
        raise ArgumentError(f"paired: of={of} and minus={minus} must be as many, and between={between} one field")
    if across and (len(across) > 1 or len(show) > 1):
        raise ArgumentError(f"paired: across={across} must be one field, and show={show} as well")
    # For every column its heading, its field, and what rows must have to be in it.
    columns: list[tuple[str, str, Mapping[str, Any]]] = [(name, field, {}) for field, name in _headings(show).items()]
    for field in across:
        values = dict.fromkeys(row[field] for row in rows)
        columns = [(str(value).partition(":")[0], columns[0][1], {field: value}) for value in values]
    lines = []
    for key in dict.fromkeys(tuple(row[field] for field in by) for row in rows):
        known = dict(zip(by, key, strict=True))
        for names in zip(of, minus, strict=True):
            sides = [_having(rows, known | {between[0]: name}) for name in names]
            found = [paired(*(_by_seed(_having(side, more), field) for side in sides)) for _, field, more in columns]
            pairs = [count for _, _, count in found if count or not across]
            if any(pairs):
                shown = [_known({between[0]: name}, between)[0] for name in names]
                cells = (_marked(*cell) for cell in found)
                lines.append([*_known(known, by), " - ".join(shown), _span(pairs), *cells])
    return markdown([*by, "difference", "pairs", *(heading for heading, _, _ in columns)], lines)


def _headings(show: Sequence[str]) -> dict[str, str]:
    return {field: heading or field for field, _, heading in (word.partition(":") for word in show)}


def _with_differences(row: Row, fields: Mapping[str, str]) -> dict[str, Any]:
    """A row with those fields that are differences of two others."""
    made = dict(row)
    for field in fields:
        after, minus, before = field.partition("-")
        if minus:
            made[field] = row[after] - row[before] if _is_known(row, after) and _is_known(row, before) else None
    return made


def _having(rows: Sequence[Row], fields: Mapping[str, Any]) -> list[Row]:
    return [row for row in rows if all(str(row[field]) == str(value) for field, value in fields.items())]


def _by_seed(rows: Sequence[Row], field: str) -> dict[int, float]:
    return {row["seed"]: row[field] for row in rows if _is_known(row, field)}


def _is_known(row: Row, field: str) -> bool:
    return row[field] is not None and math.isfinite(row[field])


def _known(row: Mapping[str, Any], by: Sequence[str]) -> list[str]:
    """The first columns."""
    cells = {field: str(row[field]) for field in by}
    if "attention" in cells:
        cells["attention"] = f"`{cells['attention']}`"
    if "setting" in cells:
        cells["setting"] = cells["setting"].partition(":")[0]
    return list(cells.values())


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _significant(value: float | None, error: float | None) -> str:
    """A mean with three significant digits, and its standard error with as many decimals."""
    if value is None:
        return ""
    digits = _digits(value)
    return f"{value:,.{digits}f}" if error is None else f"{value:,.{digits}f} +- {error:,.{digits}f}"


def _marked(value: float | None, error: float | None, pairs: int) -> str:
    """A mean difference with its standard error, the larger of which has three significant digits."""
    if value is None:
        return ""
    digits = _digits(max(abs(value), error or 0))
    text = f"{value:+,.{digits}f}" if error is None else f"{value:+,.{digits}f} +- {error:,.{digits}f}"
    return f"**{text}**" if is_beyond(value, error, pairs) else text


def _digits(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value else 2
