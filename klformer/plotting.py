"""How figures look: colours that everyone can tell apart, and one way to write a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from klformer.files import replacing

mpl.rcParams["svg.fonttype"] = "none"  # letters stay letters, to be searched and copied

#: Okabe and Ito's colours, which people with any kind of colour vision can tell apart, and line styles for more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "x", "+")


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of the number-th line of a figure."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number // len(COLOURS) % len(STYLES)]}


def plot_against_length(axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Lines of (length, value), by name, on logarithmic axes with the lengths that were measured as ticks."""
    for number, (name, points) in enumerate(lines.items()):
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=4, **line_style(number))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({length for points in lines.values() for length, _ in points}))
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("tokens L")
    axes.grid(alpha=0.3)


def save(figure: Figure, *targets: Path) -> None:
    """Write a figure in one stroke, in the format of each target's ending, and forget it. Raises as `replacing`."""
    for target in targets:
        with replacing(target) as temporary:
            figure.savefig(temporary, dpi=150, format=target.suffix[1:])
    plt.close(figure)
