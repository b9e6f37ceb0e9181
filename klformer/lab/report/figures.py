"""The figures of runs and analyses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from klformer.lab.plotting import run_labels
from klformer.lab.report.drawing import (
    INK,
    PALETTE,
    WIDTH,
    Artist,
    Drawing,
    Label,
    canvas,
    canvas_with_side,
    distinct,
    label_at_the_side,
    legend_below,
    legend_rows,
    look,
    thousands,
    visible,
)
from klformer.lab.report.settings import Setting
from klformer.lab.tables import finite
from klformer.lab.training.metrics import Metric
from klformer.memory import MEBIBYTE

#: What a figure shows at least: percent of a score in percent, a share of the best score otherwise, and a share of the
#: largest memory.
MIN_PERCENT_SPAN = 5.0
MIN_SCORE_SPAN = 0.05
MIN_MEMORY_SPAN = 0.2
#: Where an axis of percent ends at the latest.
MAX_PERCENT = 100.5
HATCHES = ("", "///", "...")
#: What the figure of memory shows at most: settings that look different, and bars on a page or so.
MAX_SETTINGS = len(PALETTE) * len(HATCHES)
MAX_BARS = 60


@dataclass(frozen=True)
class Bubble:
    """An attention in score (scaled), memory (bytes) and speed (relative)."""

    attention: str
    score: float
    memory: float
    speed: float


def draw_curves(artist: Artist, setting: Setting) -> Drawing | None:
    """Draw the metric on the validation set against steps: the mean over seeds, in a band from the lowest to the
    highest."""
    curves = {
        group.attention: [dict(run.curve) for run in group.finished or group.runs if len(run.curve) > 1]
        for group in setting.groups
    }
    curves = {attention: found for attention, found in curves.items() if found}
    if not curves:
        return None
    with look(f"curves-{setting.letter}"):
        figure, axes = canvas(list(curves))
        for attention, found in curves.items():
            draw_mean(axes, found, visible(attention), artist.style(attention) | frozen_style(attention))
        if setting.chance is not None:
            axes.axhline(setting.chance, color=INK, linewidth=0.8, linestyle=(0, (1, 3)), label="commonest answer")
        axes.set_xlabel("training step")
        axes.set_ylabel(f"validation {setting.metric.label}")
        axes.xaxis.set_major_formatter(thousands)
        axes.grid()
        legend_below(figure, axes)
        caption = (
            f"Validation {setting.metric.name} against training steps: the mean over seeds, and a band from the lowest "
            "to the highest. Frozen kernels are dashed, and so are others where colours run out. Lines that stop early "
            "are unfinished runs; one that was evaluated once has none."
        )
        return artist.finish(figure, f"curves-{setting.letter}", "Learning curves", caption)


def draw_mean(axes: Axes, curves: Sequence[Mapping[int, float]], label: str, style: Mapping[str, Any]) -> None:
    """Draw one line for the runs of an attention, as far as all of them have come."""
    steps = sorted(set.intersection(*map(set, curves)) or set(curves[0]))
    values = [[curve[step] for curve in curves if step in curve] for step in steps]
    axes.plot(steps, [fmean(found) for found in values], markersize=3, linewidth=1.3, label=label, **style)
    if len(curves) > 1:
        axes.fill_between(
            steps, [*map(min, values)], [*map(max, values)], color=style["color"], alpha=0.15, linewidth=0
        )


def frozen_style(attention: str) -> dict[str, Any]:
    """Return dashes, above the others, for frozen kernels: what lies under them is still seen."""
    return {"linestyle": (0, (4, 3)), "zorder": 3} if "frozen=true" in attention else {}


def draw_bubbles(
    artist: Artist, name: str, title: str, bubbles: Sequence[Bubble], reference: str, metric: Metric
) -> Drawing | None:
    """Draw memory against the score, the area of a circle is speed: the paper's Figures 1 and 3."""
    if not bubbles:
        return None
    with look(name):
        fastest = max(bubble.speed for bubble in bubbles)
        sizes = [420 * bubble.speed / fastest for bubble in bubbles]
        labels = [_label(bubble, size) for bubble, size in zip(bubbles, sizes, strict=True)]
        figure, axes = canvas_with_side([label.text for label in labels])
        for bubble, size in zip(bubbles, sizes, strict=True):
            colour = artist.style(bubble.attention)["color"]
            place = (bubble.score, bubble.memory / MEBIBYTE)
            # A circle at 100% goes beyond the end of the axis.
            axes.scatter(*place, s=size, color=colour, alpha=0.55, edgecolor=colour, linewidth=1, clip_on=False)
        axes.margins(0.12, 0.25)
        axes.set_xlim(_score_limits(axes.get_xlim(), [bubble.score for bubble in bubbles], metric))
        largest = max(bubble.memory for bubble in bubbles) / MEBIBYTE
        axes.set_ylim(_at_least(MIN_MEMORY_SPAN * largest, axes.get_ylim()))
        axes.set_xlabel(f"test {metric.label}")
        axes.set_ylabel("peak memory, MiB")
        axes.yaxis.set_major_formatter(thousands)
        axes.grid()
        label_at_the_side(axes, labels)
        caption = (
            f"Peak memory against test {metric.name}; the area of a circle is speed, {reference}. "
            f"Low, {'right' if metric.higher_is_better else 'left'} and large is good. "
            "Memory is that of the whole process, with Python, torch and the data."
        )
        return artist.finish(figure, name, title, caption)


def _score_limits(limits: tuple[float, float], scores: Sequence[float], metric: Metric) -> tuple[float, float]:
    if metric.percent:
        return _at_least(MIN_PERCENT_SPAN, limits, ceiling=MAX_PERCENT)
    return _at_least(MIN_SCORE_SPAN * abs(metric.best(scores)), limits)


def _at_least(span: float, limits: tuple[float, float], *, ceiling: float = math.inf) -> tuple[float, float]:
    """Return limits of an axis that are so far apart, below a ceiling: smaller differences are not to look large."""
    low, high = limits
    missing = max(0.0, span - (high - low)) / 2
    high = min(high + missing, ceiling)
    return min(low - missing, high - span), high


def draw_memory_by_task(artist: Artist, settings: Sequence[Setting]) -> Drawing | None:
    """Draw the peak memory of every attention, task by task; only bars that there are take room."""
    found = {setting.letter: (setting, memories) for setting in settings if (memories := _memories(setting))}
    if not found:
        return None
    shown = _what_fits({letter: memories for letter, (_, memories) in found.items()})
    attentions = artist.in_order({name for memories in shown.values() for name in memories})
    bars = [(name, letter) for name in attentions for letter, memories in shown.items() if name in memories]
    # Attentions stand apart by half a bar.
    places = {bar: number + 0.5 * attentions.index(bar[0]) for number, bar in enumerate(bars)}
    middles = [fmean(places[bar] for bar in bars if bar[0] == name) for name in attentions]
    with look("memory-by-task"):
        labels = [f"{found[letter][0].task.label} ({letter})" for letter in shown]
        height = 1.1 + 0.12 * (len(bars) + 0.5 * len(attentions)) + 0.2 * legend_rows(labels)
        figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
        for number, (letter, label) in enumerate(zip(shown, labels, strict=True)):
            rounds, colour = divmod(number, len(PALETTE))
            axes.barh(
                [places[name, letter] for name in shown[letter]],
                [memory / MEBIBYTE for memory in shown[letter].values()],
                height=0.9,
                color=PALETTE[colour],
                hatch=HATCHES[rounds],
                label=visible(label),
            )
        axes.set_yticks(middles, [visible(name) for name in attentions])
        axes.set_ylim(max(places.values()) + 1, -1)
        axes.set_xlabel("peak memory, MiB")
        axes.xaxis.set_major_formatter(thousands)
        axes.grid(axis="x")
        legend_below(figure, axes)
        caption = (
            "Peak memory of training and evaluation by data set: of the whole process with Python, torch and the data, "
            "or on a GPU of torch's tensors."
        )
        if cut := [letter for letter, (_, memories) in found.items() if shown.get(letter) != memories]:
            caption += f" Not all of it has room here; see the tables of the settings {', '.join(cut)}."
        return artist.finish(figure, "memory-by-task", "Memory by data set", caption)


def _what_fits(memories: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Choose settings with the most attentions first, as many as one figure can show, in their own order."""
    chosen: dict[str, dict[str, float]] = {}
    room = MAX_BARS
    for letter, of_setting in sorted(memories.items(), key=lambda item: -len(item[1])):
        if len(chosen) < MAX_SETTINGS and (len(of_setting) <= room or not chosen):
            chosen[letter] = dict(list(of_setting.items())[:room])
            room -= len(chosen[letter])
    return {letter: chosen[letter] for letter in memories if letter in chosen}


def draw_variance(
    artist: Artist, task: str, title: str, rows: Sequence[Mapping[str, Any]], caption: str
) -> Drawing | None:
    """Draw four measures of the variance of predictions, one bar a run: the paper's bar figure."""
    panels = (
        ("rsd", "RSD", 1.0),
        ("pi", "PI", 1.0),
        ("agv", "AGV", 1.0),
        ("voting_accuracy", "voting accuracy, %", 100.0),
    )
    if not rows:
        return None
    labels = distinct(run_labels(rows))
    lines = sum(label.count("\n") + 1 for label in labels)
    name = artist.name("variance", task)
    with look(name):
        height = 2 * (0.75 + 0.2 * lines)
        figure, grid = plt.subplots(2, 2, figsize=(WIDTH, height), layout="constrained", sharey=True)
        for axes, (key, heading, scale) in zip(grid.flat, panels, strict=True):
            start, form = (1.0, "{:#.4g}") if key == "agv" else (0.0, "{:.3g}")
            axes.axvline(start, color=INK, linewidth=0.8)
            for place, row in enumerate(rows):
                value = finite(row.get(key))
                if value is None:
                    axes.text(start, place, " missing", va="center", fontsize=7.5, fontstyle="italic")
                    continue
                end = value * scale
                axes.barh(
                    place, end - start, left=start, height=0.66, color=artist.style(str(row["attention"]))["color"]
                )
                # A number stands to the right of its bar, where there are no names; the bar may go to the left.
                axes.annotate(
                    form.format(end),
                    (max(end, start), place),
                    (2, 0),
                    textcoords="offset points",
                    ha="left",
                    va="center",
                    fontsize=7.5,
                )
            axes.set_title(heading, fontsize=8.5)
            axes.set_yticks(range(len(rows)), labels)
            # Numbers stand to the right, and need the room.
            low, high = axes.dataLim.intervalx
            room = (high - low) or 1.0
            axes.set_xlim(low - (0.05 * room if low < start else 0), high + (0.7 if key == "agv" else 0.35) * room)
            axes.xaxis.set_major_locator(MaxNLocator(3, steps=(1, 2, 5, 10)))
            axes.tick_params(axis="x", labelsize=7)
        grid[0, 0].invert_yaxis()
        return artist.finish(figure, name, title, caption)


def _label(bubble: Bubble, size: float) -> Label:
    text = f"{visible(bubble.attention)} {bubble.speed:.2g}x"
    return Label(text, (bubble.score, bubble.memory / MEBIBYTE), size**0.5 / 2)


def _memories(setting: Setting) -> dict[str, float]:
    """Return peak memory in bytes of the attentions that have it."""
    found = {group.attention: group.number("peak_memory_bytes") for group in setting.groups}
    return {name: memory for name, memory in found.items() if memory is not None}
