"""The figures of benchmarks: whole models and single attentions, by task and against the length of the sequence."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from klformer.lab.bench.figures import lines_of, mebibytes, milliseconds, plot_speed, spread_of
from klformer.lab.plotting import Lines, plot_against_length
from klformer.lab.report.benchmarks import Row
from klformer.lab.report.drawing import (
    Artist,
    Drawing,
    Label,
    canvas,
    canvas_with_side,
    label_at_the_side,
    legend_below,
    look,
    visible,
)
from klformer.lab.report.paper_numbers import task_title


def draw_speed(artist: Artist, rows: Sequence[Row]) -> Drawing | None:
    """Draw speed relative to softmax against memory, for whole models of one task; None if nothing was measured."""
    is_relative = any(spread_of(row, "relative") is not None for row in rows)
    measured = [row for row in rows if spread_of(row, "relative" if is_relative else "steps_per_second")]
    measured = [row for row in measured if mebibytes(row)]
    if not measured:
        return None
    task = task_title(str(rows[0]["task"]))
    name = artist.name("model-speed", str(rows[0]["task"]))
    with look(name):
        figure, axes = canvas_with_side([visible(str(row["attention"])) for row in measured])
        places = plot_speed(axes, measured, artist.style)
        label_at_the_side(axes, [Label(visible(attention), places[attention], 4) for attention in places])
        caption = (
            f"Training steps of the whole {task} model: speed{', relative to softmax,' if is_relative else ''} and "
            "peak memory above model, optimiser and inputs. Right and low is good. Points are medians, lines go from "
            "the lowest to the highest."
        )
        return artist.finish(figure, name, f"{task}: speed and memory", caption)


def draw_model_length(artist: Artist, rows: Sequence[Row]) -> Drawing | None:
    """Draw memory of the whole model against the length of the sequence: the paper's Figure 4."""
    lines = lines_of(rows, "attention", mebibytes)
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
    """Draw memory or time of one attention against the length of the sequence."""
    is_memory = quantity == "memory"
    lines = lines_of(rows, "name", mebibytes if is_memory else milliseconds)
    if not lines:
        return None
    name = artist.name(f"{quantity}-against-length")
    with look(name):
        figure = _against_length(artist, lines, "memory above the operands, MiB" if is_memory else "time, ms")
        title = "Memory against length" if is_memory else "Time against length"
        caption = "Forward and backward of one attention. Both axes are logarithmic."
        return artist.finish(figure, name, title, caption)


def _against_length(artist: Artist, lines: Lines, label: str) -> Figure:
    def style(name: str) -> dict[str, Any]:
        return {"markersize": 3.5, "linewidth": 1.3, "label": visible(name), **artist.style(name)}

    figure, axes = canvas(list(lines))
    plot_against_length(axes, {name: lines[name] for name in artist.in_order(lines)}, style)
    axes.tick_params(axis="x", labelrotation=0)
    axes.set_ylabel(label)
    axes.grid()
    legend_below(figure, axes)
    return figure
