"""The figures of a report: drawn with matplotlib, written as SVG files, and made fit to stand inside of the page.

A file has plain colours on white. In the page the same drawing takes ink and colours from the page's style sheet, so
that it follows dark mode.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from klformer.experiments.report.collect import Benchmark, finite
from klformer.experiments.report.settings import Setting
from klformer.plotting import COLOURS, MARKERS, STYLES, save

MEBIBYTE = 2**20
#: Text, axes and the palette's black; a colour of its own, so that the page can replace it.
INK, GROUND = "#22272e", "#fffffe"
PALETTE = tuple(INK if colour == "#000000" else colour for colour in COLOURS)
#: Narrow enough to be read on a phone.
WIDTH = 5.0
#: Letters of a name; the tables have it in full.
MAX_LABEL = 30
LOOK: dict[Any, Any] = {
    "font.size": 9.2,
    "legend.fontsize": 8.8,
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


@dataclass(frozen=True)
class Bubble:
    """An attention in accuracy (%), memory (bytes) and speed (relative)."""

    attention: str
    accuracy: float
    memory: float
    speed: float


class Artist:
    """Draws into a folder; an attention looks the same in all figures of a page.

    Args:
        folder: Where the SVG files go.
        attentions: All attentions of the page, in its order.
    """

    def __init__(self, folder: Path, attentions: Sequence[str]) -> None:
        self._folder = folder
        self._numbers = {attention: number for number, attention in enumerate(attentions)}

    def style(self, attention: str) -> dict[str, Any]:
        number = self._numbers.get(attention, 0)
        rounds, place = divmod(number, len(PALETTE))
        marker = MARKERS[(place + rounds) % len(MARKERS)]
        return {"color": PALETTE[place], "linestyle": STYLES[rounds % len(STYLES)], "marker": marker}

    def curves(self, setting: Setting) -> Drawing | None:
        """Validation accuracy against steps, one line a run."""
        if not any(run.curve for run in setting.runs):
            return None
        with _look(f"curves-{setting.letter}"):
            names = [group.attention for group in setting.groups if any(run.curve for run in group.runs)]
            figure, axes = _canvas(names)
            for group in setting.groups:
                shown = [run for run in group.runs if run.curve]
                for number, run in enumerate(shown):
                    steps, accuracies = zip(*run.curve, strict=True)
                    axes.plot(
                        steps,
                        [100 * accuracy for accuracy in accuracies],
                        markersize=3,
                        linewidth=1.3,
                        label=_visible(group.attention) if number == 0 else None,
                        **self.style(group.attention),
                    )
            if setting.chance is not None:
                axes.axhline(setting.chance, color=INK, linewidth=0.8, linestyle=(0, (1, 3)), label="guessing")
            axes.set_xlabel("training step")
            axes.set_ylabel("validation accuracy, %")
            axes.xaxis.set_major_formatter(_thousands)
            axes.grid()
            _legend_below(figure, axes)
            caption = (
                "Validation accuracy against training steps, one line a run. Lines that stop early are unfinished runs."
            )
            return self._finish(figure, f"curves-{setting.letter}", "Learning curves", caption)

    def bubbles(self, name: str, title: str, bubbles: Sequence[Bubble], reference: str) -> Drawing | None:
        """Memory against accuracy, the area of a circle is speed: the paper's Figures 1 and 3."""
        if not bubbles:
            return None
        with _look(name):
            figure, axes = plt.subplots(figsize=(WIDTH, 3.7))
            figure.subplots_adjust(left=0.14, right=0.97, bottom=0.14, top=0.96)
            fastest = max(bubble.speed for bubble in bubbles)
            sizes = [420 * bubble.speed / fastest for bubble in bubbles]
            for bubble, size in zip(bubbles, sizes, strict=True):
                colour = self.style(bubble.attention)["color"]
                place = (bubble.accuracy, bubble.memory / MEBIBYTE)
                axes.scatter(*place, s=size, color=colour, alpha=0.55, edgecolor=colour, linewidth=1)
            axes.margins(0.28, 0.25)
            axes.set_xlabel("test accuracy, %")
            axes.set_ylabel("peak memory, MiB")
            axes.yaxis.set_major_formatter(_thousands)
            axes.grid()
            _label_bubbles(axes, bubbles, sizes)
            caption = (
                f"Peak memory against test accuracy; the area of a circle is speed, {reference}. Low, right and large "
                "is good. Memory is that of the whole process, with Python, torch and the data."
            )
            return self._finish(figure, name, title, caption)

    def memory_by_task(self, settings: Sequence[Setting]) -> Drawing | None:
        """Peak memory of every attention, task by task."""
        known = [setting for setting in settings if _memories(setting)]
        if not known:
            return None
        shown = {setting.letter: _memories(setting) for setting in known}
        attentions = [name for name in self._numbers if any(name in memories for memories in shown.values())]
        with _look("memory-by-task"):
            labels = [f"{setting.title} ({setting.letter})" for setting in known]
            height = 1.1 + len(attentions) * (0.12 + 0.11 * len(shown)) + 0.2 * _legend_rows(labels)
            figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
            thickness = 0.8 / len(shown)
            for number, (memories, label) in enumerate(zip(shown.values(), labels, strict=True)):
                rounds, place = divmod(number, len(PALETTE))
                axes.barh(
                    [attentions.index(name) - 0.4 + thickness * (number + 0.5) for name in memories],
                    [memory / MEBIBYTE for memory in memories.values()],
                    height=0.9 * thickness,
                    color=PALETTE[place],
                    hatch=("", "///", "...")[rounds % 3],
                    label=_visible(label),
                )
            axes.set_yticks(range(len(attentions)), [_visible(name) for name in attentions])
            axes.invert_yaxis()
            axes.set_xlabel("peak memory, MiB")
            axes.xaxis.set_major_formatter(_thousands)
            axes.grid(axis="x")
            _legend_below(figure, axes)
            caption = (
                "Peak memory of training and evaluation by data set. It is that of the whole process. Runs of one "
                "klformer compare share a process, so that a later one can't show less than an earlier one."
            )
            return self._finish(figure, "memory-by-task", "Memory by data set", caption)

    def against_length(self, benchmark: Benchmark, number: int, quantity: str) -> Drawing | None:
        """Memory or time of one attention against the length of the sequence: the paper's Figure 4."""
        scale = 1 / MEBIBYTE if quantity == "memory" else 1e3
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in benchmark.rows:
            value = finite(row.get(quantity))
            if value is not None and value > 0:
                lines.setdefault(str(row["name"]), []).append((row["length"], value * scale))
        if not lines:
            return None
        suffix = f"-{number}" if number > 1 else ""
        with _look(f"{quantity}-against-length{suffix}"):
            figure, axes = _canvas(list(lines))
            for name in (attention for attention in self._numbers if attention in lines):
                points, style = lines[name], self.style(name)
                axes.plot(
                    *zip(*sorted(points), strict=True), markersize=3.5, linewidth=1.3, label=_visible(name), **style
                )
            lengths = sorted({length for points in lines.values() for length, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.minorticks_off()
            axes.set_xticks(lengths if len(lengths) <= 7 else lengths[:: -(-len(lengths) // 7)])
            axes.xaxis.set_major_formatter(_thousands)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value:,.0f}")
            axes.set_xlabel("tokens L")
            axes.set_ylabel("memory above the operands, MiB" if quantity == "memory" else "time, ms")
            axes.grid()
            _legend_below(figure, axes)
            sizes = benchmark.sizes
            caption = (
                f"Forward and backward of one attention: B={sizes.get('batch', '?')}, H={sizes.get('heads', '?')}, "
                f"D={sizes.get('head_dim', '?')}, R={sizes.get('num_frequencies', '?')}; {benchmark.machine}, "
                f"{benchmark.date}. Both axes are logarithmic."
            )
            title = "Memory against length" if quantity == "memory" else "Time against length"
            return self._finish(figure, f"{quantity}-against-length{suffix}", title, caption)

    def variance(self, task: str, title: str, rows: Sequence[Mapping[str, Any]], caption: str) -> Drawing | None:
        """Four measures of the variance of predictions, one bar a run: the paper's bar figure."""
        panels = (
            ("rsd", "RSD", 1.0),
            ("pi", "PI", 1.0),
            ("agv", "AGV", 1.0),
            ("voting_accuracy", "voting accuracy, %", 100.0),
        )
        if not rows:
            return None
        labels = [str(row["attention"]) for row in rows]
        if len(set(labels)) < len(labels):
            labels = [str(row["run"]) for row in rows]
        name = "variance-" + re.sub(r"[^a-z0-9.]+", "-", task.lower())
        with _look(name):
            height = 2 * (0.75 + 0.2 * len(rows))
            figure, grid = plt.subplots(2, 2, figsize=(WIDTH, height), layout="constrained", sharey=True)
            for axes, (key, heading, scale) in zip(grid.flat, panels, strict=True):
                values = [finite(row.get(key)) for row in rows]
                for place, (row, value) in enumerate(zip(rows, values, strict=True)):
                    if value is None:
                        axes.text(0, place, " missing", va="center", fontsize=7.5, fontstyle="italic")
                        continue
                    start = 1.0 if key == "agv" else 0.0
                    colour = self.style(str(row["attention"]))["color"]
                    axes.barh(place, value * scale - start, left=start, height=0.66, color=colour)
                    axes.annotate(
                        f"{value * scale:.3g}",
                        (value * scale, place),
                        (2, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=7.5,
                    )
                axes.set_title(heading, fontsize=8.5)
                axes.set_yticks(range(len(rows)), [_visible(label) for label in labels])
                axes.margins(x=0.2)
                axes.tick_params(axis="x", labelsize=7)
            grid[0, 0].invert_yaxis()
            return self._finish(figure, name, title, caption)

    def _finish(self, figure: Figure, name: str, title: str, caption: str) -> Drawing:
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"{name}.svg"
        save(figure, target)
        return Drawing(name, title, caption, inline(target.read_text(), name, title))


def inline(svg: str, name: str, title: str) -> Markup:
    """A file's SVG for use inside of the page: no preamble, ids of its own, colours of the page, any width."""
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
def _look(name: str) -> Iterator[None]:
    """The look of the report's figures; ids are the same for the same figure."""
    with mpl.rc_context({**LOOK, "svg.hashsalt": name}), warnings.catch_warnings():
        # Letters stay letters in SVG, so that a browser draws what the measuring font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def _canvas(labels: Sequence[str]) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(WIDTH, 2.9 + 0.17 * _legend_rows(labels)), layout="constrained")


def _legend_columns(labels: Sequence[str]) -> int:
    longest = max(map(len, labels), default=0)
    return 3 if longest <= 15 else 2 if longest <= 30 else 1


def _legend_rows(labels: Sequence[str]) -> int:
    return -(-(len(labels) + 1) // _legend_columns(labels))


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=_legend_columns(labels), handlelength=2.6)


def _memories(setting: Setting) -> dict[str, float]:
    """Peak memory in bytes of the attentions that have it."""
    found = {group.attention: group.number("peak_memory_bytes") for group in setting.groups}
    return {name: memory for name, memory in found.items() if memory is not None}


def _visible(label: str) -> str:
    """Short enough for a figure; matplotlib leaves labels with a leading underscore out of legends."""
    short = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
    return f" {short}" if short.startswith("_") else short


def _thousands(value: float, _: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


def _label_bubbles(axes: Axes, bubbles: Sequence[Bubble], sizes: Sequence[float]) -> None:
    """Names beside the circles: on the side with more room, moved apart where they would overlap."""
    gap = 10.5  # points from one line of text to the next
    to_points = 72 / axes.figure.dpi
    middle = axes.transAxes.transform((0.55, 0))[0] * to_points
    sides: dict[int, list[tuple[float, float, Bubble]]] = {1: [], -1: []}
    for bubble, size in zip(bubbles, sizes, strict=True):
        x, y = axes.transData.transform((bubble.accuracy, bubble.memory / MEBIBYTE)) * to_points
        sides[1 if x < middle else -1].append((y, size**0.5 / 2 + 3, bubble))
    for side, entries in sides.items():
        lowest = float("-inf")
        for y, distance, bubble in sorted(entries, key=lambda entry: entry[0]):
            lowest = max(y, lowest + gap)
            moved = lowest - y > 3
            axes.annotate(
                f"{_visible(bubble.attention)} {bubble.speed:.2g}x",
                (bubble.accuracy, bubble.memory / MEBIBYTE),
                (side * (distance + (8 if moved else 0)), lowest - y),
                textcoords="offset points",
                ha="left" if side == 1 else "right",
                va="center",
                fontsize=8,
                arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.5, "alpha": 0.6} if moved else None,
            )
