"""How figures look: one style, colours that everyone can tell apart, and one way to write a file."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from klformer.files import replacing

#: Okabe and Ito's colours, which people with any kind of colour vision can tell apart, and line styles for more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "x", "+")
#: The same thing has the same colour in all figures.
LEARNED, FIXED, FROZEN, TRUTH = COLOURS[0], COLOURS[1], COLOURS[4], COLOURS[6]
#: Inches of a figure as wide as a page, and of half of it; letters of 10 points can be read at half of that size.
WIDE, NARROW = 8.0, 5.0
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters, to be searched and copied
    "font.size": 11,
    "axes.titlesize": 11.5,
    "axes.labelsize": 11,
    "legend.fontsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "image.cmap": "cividis",
}
# For whatever is drawn after this import; the report's figures add to it (report/drawing.py).
mpl.rcParams.update(STYLE)


def line_style(number: int) -> dict[str, Any]:
    """Return the colour and dashes of the number-th line of a figure."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number // len(COLOURS) % len(STYLES)]}


def run_labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the shortest names that tell the runs of an analysis apart: attention, task where there are several, then
    seed, folder, and at last a number."""
    several = len({row.get("task") for row in rows}) > 1
    names = [f"{row['attention']}, {row['task']}" if several else str(row["attention"]) for row in rows]
    for field, word in (("seed", "seed "), ("folder", "in ")):
        longer = [f"{name}, {word}{row.get(field)}" for name, row in zip(names, rows, strict=True)]
        if len(set(longer)) > len(set(names)):
            names = longer
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, start=1)]
    return names


#: What is drawn against the length: points (length, value) by name.
Lines = Mapping[str, Sequence[tuple[float, float]]]
#: Labels along an axis of lengths.
MAX_TICKS = 7


def plot_against_length(axes: Axes, lines: Lines, style: Callable[[str], Mapping[str, Any]] | None = None) -> None:
    """Draw lines on logarithmic axes, with lengths that were measured as ticks.

    Args:
        style: What lines look like, by their name; colours, dashes and markers in turn, if it is not given.
    """
    for number, (name, points) in enumerate(lines.items()):
        usual = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, **line_style(number)}
        axes.plot(*zip(*sorted(points), strict=True), **({"label": name, **usual} if style is None else style(name)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(ticks_of({length for points in lines.values() for length, _ in points}))
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value:,.0f}")
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("tokens L")
    axes.grid(alpha=0.3)


def ticks_of(lengths: Collection[float]) -> list[float]:
    """Return the lengths from the longest down, as many as have room beside each other on a logarithmic axis."""
    step = (max(lengths) / min(lengths)) ** (1 / MAX_TICKS)
    ticks: list[float] = []
    for length in sorted(lengths, reverse=True):
        if not ticks or ticks[-1] / length >= step:
            ticks.append(length)
    return ticks


def save(figure: Figure, *targets: Path) -> None:
    """Write a figure in one stroke, in the format of each target's ending, and forget it. Raises as `replacing`."""
    for target in targets:
        with replacing(target) as temporary:
            figure.savefig(temporary, dpi=150, format=target.suffix[1:])
    plt.close(figure)
