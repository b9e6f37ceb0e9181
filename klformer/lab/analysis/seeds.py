"""Runs that differ in nothing but their seed, taken together."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None of fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def over_seeds(rows: Sequence[Row], *, by: Sequence[str], values: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for all seeds of a group.

    Args:
        rows: One a run.
        by: The fields that a group has in common; groups are in the order in which they come.
        values: The fields to take together.

    Returns:
        Rows with the fields of `by`, `seeds` (how many runs there are) and, for each of `values`, the mean,
        `NAME_error`, the standard error, and `NAME_count`, of how many it is. A value that is None or not finite is
        left out; mean and error are None if all are.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in by), []).append(row)
    together = []
    for key, group in groups.items():
        merged: dict[str, Any] = dict(zip(by, key, strict=True)) | {"seeds": len(group)}
        for name in values:
            found = [row[name] for row in group if row[name] is not None and math.isfinite(row[name])]
            merged[name] = statistics.fmean(found) if found else None
            merged[f"{name}_error"] = standard_error(found)
            merged[f"{name}_count"] = len(found)
        together.append(merged)
    return together
