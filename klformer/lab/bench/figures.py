"""What figures of benchmarks show, for the files that a benchmark writes and for the report, which looks otherwise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from klformer.lab.tables import finite
from klformer.memory import MEBIBYTE

Row = Mapping[str, Any]
#: What the points and lines of an attention look like.
Style = Callable[[str], Mapping[str, Any]]


def spread_of(row: Row, key: str) -> tuple[float, float, float] | None:
    """Return the lowest, the median and the highest; None without a median."""
    found = row.get(key) or {}
    median = finite(found.get("median"))
    if median is None:
        return None
    low, high = (finite(found.get(end)) for end in ("low", "high"))
    return min(median, median if low is None else low), median, max(median, median if high is None else high)


def mebibytes(row: Row) -> float:
    """Return the peak memory of a row, 0 if there is none."""
    return (finite(row.get("memory")) or 0) / MEBIBYTE


def milliseconds(row: Row) -> float:
    """Return the median time of a row, 0 if there is none."""
    return 1e3 * (spread_of(row, "seconds") or (0, 0, 0))[1]


def lines_of(rows: Sequence[Row], key: str, value: Callable[[Row], float]) -> dict[str, list[tuple[float, float]]]:
    """Return lengths and values above 0 by what `key` names."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if value(row) > 0:
            lines.setdefault(str(row[key]), []).append((row["length"], value(row)))
    return lines


def plot_speed(axes: Axes, rows: Sequence[Row], style: Style) -> dict[str, tuple[float, float]]:
    """Draw the speed of a task's model against its memory, with lines from the lowest to the highest speed.

    Speed is relative to softmax, or steps a second if softmax was not run.

    Returns:
        The places of the attentions that have both.
    """
    is_relative = any(spread_of(row, "relative") for row in rows)
    places = {}
    for row in rows:
        speed = spread_of(row, "relative" if is_relative else "steps_per_second")
        if speed is None or not mebibytes(row):
            continue
        low, median, high = speed
        name = str(row["attention"])
        places[name] = (median, mebibytes(row))
        look = {**style(name), "linestyle": "none"}
        axes.errorbar(*places[name], xerr=[[median - low], [high - median]], markersize=6, elinewidth=1, **look)
    if is_relative:
        axes.axvline(1, color="#888888", linewidth=0.8, linestyle=(0, (1, 3)))
    axes.margins(0.08, 0.12)
    axes.set_xlabel("training steps a second" + (", softmax = 1" if is_relative else ""))
    axes.set_ylabel("peak memory of a step, MiB")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}")
    axes.grid()
    return places
