"""The figures of benchmarks: whole models and single attentions, by task and against the length of the sequence."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from klformer.lab.report.benchmarks import Row
from klformer.lab.report.drawing import (
    INK,
    Artist,
    Drawing,
    Label,
    canvas,
    canvas_with_side,
    label_at_the_side,
    legend_below,
    look,
    thousands,
    visible,
)
from klformer.lab.report.paper_numbers import task_title
from klformer.lab.tables import finite
from klformer.memory import MEBIBYTE

#: Lines by attention: lengths and values.
Lines = Mapping[str, Sequence[tuple[float, float]]]
#: Labels along an axis of lengths.
MAX_TICKS = 7


def draw_speed(artist: Artist, rows: Sequence[Row]) -> Drawing | None:
    """Speed relative to softmax against memory, for whole models of one task; steps a second if there is no softmax."""
    relative = any(_spread(row, "relative") is not None for row in rows)
    points = {
        str(row["attention"]): (speed, memory / MEBIBYTE)
        for row in rows
        if (speed := _spread(row, "relative" if relative else "steps_per_second")) is not None
        and (memory := finite(row.get("memory"))) is not None
    }
    if not points:
        return None
    task = task_title(str(rows[0]["task"]))
    name = artist.name("model-speed", str(rows[0]["task"]))
    with look(name):
        figure, axes = canvas_with_side([visible(attention) for attention in points])
        labels = []
        for attention in artist.in_order(points):
            (low, median, high), memory = points[attention]
            place = (median, memory)
            style = {**artist.style(attention), "linestyle": "none"}
            axes.errorbar(*place, xerr=[[median - low], [high - median]], markersize=6, elinewidth=1, **style)
            labels.append(Label(visible(attention), place, 4))
        if relative:
            axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
        axes.margins(0.08, 0.12)
        axes.set_xlabel("training steps a second, softmax = 1" if relative else "training steps a second")
        axes.set_ylabel("peak memory of a step, MiB")
        axes.yaxis.set_major_formatter(thousands)
        axes.grid()
        label_at_the_side(axes, labels)
        caption = (
            f"Training steps of the whole {task} model: speed{', relative to softmax,' if relative else ''} and peak "
            "memory above model, optimiser and inputs. Right and low is good. Points are medians, lines go from the "
            "lowest to the highest."
        )
        return artist.finish(figure, name, f"{task}: speed and memory", caption)


def draw_model_length(artist: Artist, rows: Sequence[Row]) -> Drawing | None:
    """Memory of the whole model against the length of the sequence: the paper's Figure 4."""
    lines = _lines(rows, "attention", lambda row: (finite(row.get("memory")) or 0) / MEBIBYTE)
    if not lines:
        return None
    task = task_title(str(rows[0]["task"]))
    name = artist.name("model-memory-against-length")
    with look(name):
        figure = _against_length(artist, lines, "peak memory of a step, MiB")
        caption = (
            f"Peak memory of a training step of the {task} model with one sequence, above model, optimiser and inputs, "
            "as in the paper's Figure 4 and on to greater lengths. Both axes are logarithmic."
        )
        if any(row.get("not_run") for row in rows):
            caption += " A line ends where an attention was not run; the table says why."
        return artist.finish(figure, name, f"Memory of the whole {task} model against length", caption)


def draw_attention_length(artist: Artist, rows: Sequence[Row], quantity: str) -> Drawing | None:
    """Memory or time of one attention against the length of the sequence."""

    def value(row: Row) -> float:
        if quantity == "memory":
            return (finite(row.get("memory")) or 0) / MEBIBYTE
        return 1e3 * (_spread(row, "seconds") or (0, 0, 0))[1]

    lines = _lines(rows, "name", value)
    if not lines:
        return None
    name = artist.name(f"{quantity}-against-length")
    with look(name):
        label = "memory above the operands, MiB" if quantity == "memory" else "time, ms"
        figure = _against_length(artist, lines, label)
        title = "Memory against length" if quantity == "memory" else "Time against length"
        caption = "Forward and backward of one attention. Both axes are logarithmic."
        return artist.finish(figure, name, title, caption)


def _against_length(artist: Artist, lines: Lines, label: str) -> Figure:
    figure, axes = canvas(list(lines))
    for name in artist.in_order(lines):
        points, style = sorted(lines[name]), artist.style(name)
        axes.plot(*zip(*points, strict=True), markersize=3.5, linewidth=1.3, label=visible(name), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(_ticks({length for points in lines.values() for length, _ in points}))
    axes.xaxis.set_major_formatter(thousands)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value:,.0f}")
    axes.set_xlabel("tokens L")
    axes.set_ylabel(label)
    axes.grid()
    legend_below(figure, axes)
    return figure


def _ticks(lengths: set[float]) -> list[float]:
    """From the longest down, as many as have room beside each other on a logarithmic axis."""
    step = (max(lengths) / min(lengths)) ** (1 / MAX_TICKS)
    ticks: list[float] = []
    for length in sorted(lengths, reverse=True):
        if not ticks or ticks[-1] / length >= step:
            ticks.append(length)
    return ticks


def _lines(rows: Sequence[Row], key: str, value: Callable[[Row], float]) -> dict[str, list[tuple[float, float]]]:
    """Return lengths and values above 0 by attention."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if value(row) > 0:
            lines.setdefault(str(row[key]), []).append((row["length"], value(row)))
    return lines


def _spread(row: Row, key: str) -> tuple[float, float, float] | None:
    """Return the lowest, the median and the highest; None without a median."""
    found = row.get(key) or {}
    median = finite(found.get("median"))
    if median is None:
        return None
    low, high = (finite(found.get(end)) for end in ("low", "high"))
    return min(median, median if low is None else low), median, max(median, median if high is None else high)
