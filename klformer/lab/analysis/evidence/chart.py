"""Learned kernels beside the same kernels frozen, as a picture: a panel for every setting."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from klformer.lab.analysis.evidence.measure import error_of
from klformer.lab.plotting import FIXED, FROZEN, LEARNED, WIDE

_COLUMNS = 2


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the mean of every attention with its standard error over seeds; what has no frozen self has its own
    colour."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    columns = min(_COLUMNS, len(settings))
    lines = [settings[start : start + columns] for start in range(0, len(settings), columns)]
    panels = {setting: _sorted([row for row in rows if row["setting"] == setting]) for setting in settings}
    heights = [max(len(panels[setting]) for setting in line) + 3 for line in lines]
    figure, axes = plt.subplots(
        len(lines),
        columns,
        figsize=(WIDE, 0.3 * sum(heights) + 0.6),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for place, setting in enumerate(settings):
        _draw_panel(axes.flat[place], setting, panels[setting])
    for unused in axes.flat[len(settings) :]:
        unused.set_axis_off()
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3)
    return figure


def _sorted(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort rows from the smallest, which is drawn lowest, to the largest."""
    return sorted(rows, key=lambda row: row["frozen"] if row["learned"] is None else row["learned"])


def _draw_panel(axes: Axes, setting: str, rows: Sequence[Mapping[str, Any]]) -> None:
    title, _, unit = setting.partition(": ")
    for height, row in enumerate(rows):
        if row["learned"] is not None and row["frozen"] is not None:
            axes.plot([row["frozen"], row["learned"]], [height, height], color="0.8", linewidth=3, zorder=1)
    pairs = [row["pairs"] > 0 for row in rows]
    _points(axes, rows, "learned", [not pair for pair in pairs], "without a frozen self", color=FIXED, marker="D")
    _points(axes, rows, "frozen", [True] * len(rows), "frozen", color=FROZEN, marker="s")
    _points(axes, rows, "learned", pairs, "learned", color=LEARNED, marker="o")
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_title(title, loc="left")
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)


def _points(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    field: Literal["learned", "frozen"],
    shown: Sequence[bool],
    label: str,
    **style: Any,
) -> None:
    places = [place for place, row in enumerate(rows) if shown[place] and row[field] is not None]
    values = [rows[place][field] for place in places]
    errors = [error_of(rows[place], field) or 0.0 for place in places]
    axes.errorbar(values, places, xerr=errors, linestyle="none", markersize=6, capsize=2, label=label, **style)


def _name(row: Mapping[str, Any]) -> str:
    name, _, options = row["attention"].partition(":")
    words = [name, *([options.replace(",", ", ")] if options else []), *(["kept"] if row["draw"] == "kept" else [])]
    return ", ".join(words)
