"""JSON that somebody else wrote: what is in a file, or one error with the file's name."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError


def finite(value: object) -> float | None:
    """A finite number as it is, anything else as None, which pages show as missing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def rows_of(content: Mapping[str, Any], key: str, needed: Sequence[str], path: Path) -> tuple[Mapping[str, Any], ...]:
    """A list of objects, each with the fields that are needed.

    Raises:
        ValueError: there is no such list, or an object lacks a field.
    """
    rows = content.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ArgumentError(f"{path} has no list of {key}")
    for row in rows:
        if missing := [name for name in needed if name not in row]:
            raise ArgumentError(f"{path}: a row of {key} has no {missing[0]!r}: {row}")
    return tuple(rows)
