"""How figures look: colours that everyone can tell apart, and one way to write a file."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

mpl.rcParams["svg.fonttype"] = "none"  # letters stay letters, to be searched and copied

#: Okabe and Ito's colours, which people with any kind of colour vision can tell apart, and line styles for more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "x", "+")


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of the number-th line of a figure."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number // len(COLOURS) % len(STYLES)]}


def save(figure: Figure, *targets: Path) -> None:
    """Write a figure, in the format of each target's ending, and forget it."""
    for target in targets:
        figure.savefig(target, dpi=150)
    plt.close(figure)
