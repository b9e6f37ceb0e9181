"""How figures of a report are drawn: with matplotlib, written as SVG files, and made fit to stand inside of the page.

A file has plain colours on white. In the page the same drawing takes ink and colours from the page's style sheet, so
that it follows dark mode.
"""

import itertools
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from klformer.lab.plotting import COLOURS, MARKERS, STYLES, save

#: Text, axes and the palette's black; a colour of its own, so that the page can replace it.
INK, GROUND = "#22272e", "#fffffe"
PALETTE = tuple(INK if colour == "#000000" else colour for colour in COLOURS)
#: Narrow enough to be read on a phone.
WIDTH = 5.0
#: Letters of a name; the tables have it in full.
MAX_LABEL = 30
#: Inches that a letter beside a figure takes.
LETTER = 0.067
#: Stands in the head of a figure's file, so that a later report may remove it.
MARK = "<!-- a figure of klformer report -->"
#: Letters of a file's name.
MAX_NAME = 60
LOOK: dict[Any, Any] = {
    "font.size": 9.2,
    "legend.fontsize": 8.8,
    "axes.labelsize": "medium",
    "axes.titlesize": "large",
    "xtick.labelsize": "medium",
    "ytick.labelsize": "medium",
    "lines.linewidth": 1.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": GROUND,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.facecolor": GROUND,
    "text.color": INK,
    "text.parse_math": False,  # names of runs are not formulas
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Drawing:
    """A figure in the page and as a file."""

    name: str
    title: str
    caption: str
    svg: Markup


class Artist:
    """Where figures go and what attentions look like: the same in all figures of a page."""

    def __init__(self, folder: Path, attentions: Sequence[str]) -> None:
        self._folder = folder
        self._numbers = {attention: number for number, attention in enumerate(attentions)}
        self._names: set[str] = set()

    def style(self, attention: str) -> dict[str, Any]:
        number = self._numbers.get(attention, 0)
        rounds, place = divmod(number, len(PALETTE))
        marker = MARKERS[(place + rounds) % len(MARKERS)]
        return {"color": PALETTE[place], "linestyle": STYLES[rounds % len(STYLES)], "marker": marker}

    def in_order(self, attentions: Collection[str]) -> list[str]:
        """Return those of the page's attentions that are given, in its order."""
        return [attention for attention in self._numbers if attention in attentions]

    def name(self, *parts: str) -> str:
        """Make a name for a figure that is fit for a file and an id, and that no other figure has."""
        wanted = re.sub(r"[^a-z0-9.]+", "-", "-".join(parts).lower())[:MAX_NAME]
        candidates = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
        name = next(candidate for candidate in candidates if candidate not in self._names)
        self._names.add(name)
        return name

    def finish(self, figure: Figure, name: str, title: str, caption: str) -> Drawing:
        """Write the file, and make the figure fit for the page."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"{name}.svg"
        save(figure, target)
        svg = target.read_text(encoding="utf-8")
        target.write_text(svg.replace("<svg", f"{MARK}\n<svg", 1), encoding="utf-8")
        return Drawing(name, title, caption, inline(svg, name, title))


def is_drawn_here(path: Path) -> bool:
    """Return whether a file is a figure of a report, and not somebody's own."""
    with path.open("rb") as file:
        return MARK.encode() in file.read(1000)


def inline(svg: str, name: str, title: str) -> Markup:
    """Return a file's SVG for use inside of the page: no preamble, ids of its own, colours of the page, any width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]*)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", svg)
    replaced = {INK: "currentColor", GROUND: "none"}
    replaced |= {colour: f"var(--c{number})" for number, colour in enumerate(PALETTE) if colour != INK}
    for colour, new in replaced.items():
        # Colours stand in style attributes only; names of runs are text and stay as they are.
        svg = re.sub(rf"((?:fill|stroke): ){colour.lower()}", rf"\1{new}", svg)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height|version|xmlns(?::xlink)?)="[^"]*"', "", opening)
    return Markup(f'{opening} role="img" aria-label="{escape(title)}">{rest}')


@contextmanager
def look(name: str) -> Iterator[None]:
    """Draw with the look of the report's figures; ids are the same for the same figure."""
    with mpl.rc_context({**LOOK, "svg.hashsalt": name}), warnings.catch_warnings():
        # Letters stay letters in SVG, so that a browser draws what the measuring font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def canvas(labels: Sequence[str]) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(WIDTH, 2.9 + 0.17 * legend_rows(labels)), layout="constrained")


def _legend_columns(labels: Sequence[str]) -> int:
    longest = max(map(len, labels), default=0)
    return 3 if longest <= 15 else 2 if longest <= 30 else 1


def legend_rows(labels: Sequence[str]) -> int:
    return -(-(len(labels) + 1) // _legend_columns(labels))


def legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=_legend_columns(labels), handlelength=2.6)


def visible(label: str) -> str:
    """Shorten a label for a figure; matplotlib leaves labels with a leading underscore out of legends.

    Names of one kind begin alike and differ at their ends, so that more of the end is left.
    """
    short = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL // 3]}…{label[-(2 * MAX_LABEL // 3 - 1) :]}"
    return f" {short}" if short.startswith("_") else short


def distinct(labels: Sequence[str]) -> list[str]:
    """Shorten labels; those that would not differ any more are wrapped instead."""
    short = [visible(label) for label in labels]
    return [
        visible_label if short.count(visible_label) == 1 else "\n".join(wrap(label, MAX_LABEL))
        for visible_label, label in zip(short, labels, strict=True)
    ]


def thousands(value: float, _: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Label:
    """A name beside a point, `distance` points of type away from its middle."""

    text: str
    place: tuple[float, float]
    distance: float


def canvas_with_side(texts: Sequence[str]) -> tuple[Figure, Axes]:
    """Make a figure with room for names in a column right of the axes, by `label_at_the_side`."""
    figure, axes = plt.subplots(figsize=(WIDTH, max(3.7, 0.21 * len(texts))))
    longest = max(map(len, texts))
    figure.subplots_adjust(left=0.14, right=0.95 - longest * LETTER / WIDTH, bottom=0.14, top=0.96)
    return figure, axes


def label_at_the_side(axes: Axes, labels: Sequence[Label]) -> None:
    """Write names in a column right of the axes, each with a line to its point; points that are close stay readable."""
    gap = 12.0  # points from one line of text to the next
    to_points = 72 / axes.figure.dpi
    (left, bottom), (right, top) = (axes.transAxes.transform(corner) * to_points for corner in ((0, 0), (1, 1)))
    ordered = sorted(labels, key=lambda label: label.place[1])
    heights = [axes.transData.transform(label.place)[1] * to_points - bottom for label in ordered]
    for position in range(1, len(heights)):
        heights[position] = max(heights[position], heights[position - 1] + gap)
    ceiling = top - bottom
    for position in reversed(range(len(heights))):
        heights[position] = min(heights[position], ceiling)
        ceiling = heights[position] - gap
    for label, height in zip(ordered, heights, strict=True):
        axes.annotate(
            label.text,
            label.place,
            (right - left + 10, height),
            textcoords="axes points",
            ha="left",
            va="center",
            fontsize=8,
            arrowprops={
                "arrowstyle": "-",
                "color": INK,
                "linewidth": 0.5,
                "alpha": 0.45,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": label.distance,
            },
        )
