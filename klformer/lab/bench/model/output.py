"""The tables and figures of `klformer bench model`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from rich.console import Console
from rich.table import Table

from klformer.lab.bench.measure import growth, with_spread
from klformer.lab.bench.report import Cells, as_table
from klformer.lab.plotting import COLOURS, MARKERS, plot_against_length, save
from klformer.lab.tasks import TASKS
from klformer.memory import MEBIBYTE

SPEED_NOTE = (
    "default allocator; median (lowest to highest) over processes; processor: time of all threads; relative: softmax's "
    "time / its own;\nMiB: peak above model, optimiser and inputs"
)
LENGTH_NOTE = "peak above model, optimiser and inputs"


def say_speed(console: Console, task: str, rows: Sequence[dict[str, Any]]) -> None:
    """Speed and memory of a task's model with each attention."""
    _say(console, _speed_heading(task, rows), as_table(speed_cells(rows)), SPEED_NOTE)


def say_length(console: Console, task: str, rows: Sequence[dict[str, Any]]) -> None:
    """Memory of a task's model with each attention at each length, and why some were not measured."""
    reasons = dict.fromkeys(row["not_run"] for row in rows if row["not_run"] is not None)
    notes = [LENGTH_NOTE, *(f"-: {reason}" for reason in reasons)]
    heading = f"{task} model, one sequence: peak memory of a training step, MiB"
    _say(console, heading, _length_table(rows), "\n".join(notes))


def draw_speed(report: dict[str, Any], *targets: Path) -> None:
    """Speed relative to softmax and peak memory, a row for each attention and a colour for each task."""
    rows = [row for row in report["speed"] if row["not_run"] is None]
    tasks = list(dict.fromkeys(row["task"] for row in report["speed"]))
    names = list(dict.fromkeys(row["attention"] for row in report["speed"]))[::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 1.6 + 0.38 * len(names)), sharey=True, layout="constrained")
    for number, task in enumerate(tasks):
        mine = [row for row in rows if row["task"] == task]
        offset = 0.16 * ((len(tasks) - 1) / 2 - number)
        batch = next(row["batch_size"] for row in report["speed"] if row["task"] == task)
        label = f"{task}, batches of {batch}"
        for axes, key in ((left, "relative"), (right, "memory")):
            shown = [(names.index(row["attention"]) + offset, row[key]) for row in mine if row[key] is not None]
            if key == "memory":
                shown = [(height, dict.fromkeys(("median", "low", "high"), value)) for height, value in shown]
            _dots(axes, shown, 1 / MEBIBYTE if key == "memory" else 1.0, number, label)
    left.axvline(1, color="#888888", linewidth=0.8)
    left.set_xlabel("training steps per second, softmax = 1")
    right.set_xlabel("peak memory of a step, MiB above model, optimiser and inputs")
    left.set_yticks(range(len(names)), names)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside right center", frameon=False)
    where = report["environment"].get("device", report["environment"]["machine"])
    preset, date = report["options"].get("preset", "paper"), report["environment"]["date"]
    figure.suptitle(f"Training the models of preset {preset}: {where}, {date}", fontsize=10)
    save(figure, *targets)


def draw_length(report: dict[str, Any], *targets: Path) -> None:
    """Peak memory against the length, both on logarithmic axes."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    rows = [row for row in report["length"] if row["memory"] is not None]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["attention"], []).append((row["length"], row["memory"] / MEBIBYTE))
    plot_against_length(axes, lines)
    axes.set_ylabel("peak memory of a step, MiB above model and optimiser")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside right center", frameon=False)
    date = report["environment"]["date"]
    figure.suptitle(f"Memory against length: the Text model, one sequence, {date}", fontsize=10)
    save(figure, *targets)


def _say(console: Console, heading: str, table: Table, note: str) -> None:
    """A table between two texts, which a narrow table does not break."""
    console.print(f"\n{heading}", highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(note, highlight=False, markup=False, soft_wrap=True)


def _speed_heading(task: str, rows: Sequence[dict[str, Any]]) -> str:
    batch, paper_batch, length = rows[0]["batch_size"], rows[0]["paper_batch_size"], rows[0]["length"]
    reason = f"; {rows[0]['batch_note']}" if rows[0]["batch_note"] else ""
    whose = "the paper" if rows[0].get("preset", "paper") == "paper" else f"preset {rows[0]['preset']}"
    size = f"{whose}'s" if batch == paper_batch else f"{whose} has {paper_batch}{reason}"
    one, many = ("pair of sequences", "pairs of sequences") if TASKS[task].is_pair else ("sequence", "sequences")
    return f"{task}: training step of {batch} {one if batch == 1 else many} ({size}) of {length:,} tokens"


def speed_cells(rows: Sequence[Mapping[str, Any]]) -> list[Cells]:
    """A line for each attention on one task; "not run" in place of figures where there are none."""
    return [
        {
            "attention": row["attention"],
            "steps / s": "not run" if row["not_run"] is not None else with_spread(row["steps_per_second"], ".3g"),
            "processor s a step": with_spread(row["processor"], ".3g"),
            "relative to softmax": with_spread(row["relative"], ".2f"),
            "relative, processor": with_spread(row["relative_processor"], ".2f"),
            "MiB": f"{row['memory'] / MEBIBYTE:,.0f}" if row["not_run"] is None else "",
        }
        for row in rows
    ]


def _length_table(rows: Sequence[dict[str, Any]]) -> Table:
    lengths = sorted({row["length"] for row in rows})
    table = Table()
    table.add_column("attention")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    table.add_column("grows as", justify="right")
    for name in dict.fromkeys(row["attention"] for row in rows):
        mine = {row["length"]: row["memory"] for row in rows if row["attention"] == name}
        cells = ["-" if mine[length] is None else f"{mine[length] / MEBIBYTE:,.0f}" for length in lengths]
        measured = [(length, mine[length]) for length in lengths if mine[length] is not None]
        table.add_row(name, *cells, growth(*zip(*measured, strict=True)) if measured else "")
    return table


def _dots(axes: Axes, points: Sequence[tuple[float, dict[str, float]]], scale: float, number: int, label: str) -> None:
    """A marker at each median, and a line from the lowest to the highest."""
    if not points:
        return
    medians = [values["median"] * scale for _, values in points]
    below = [(values["median"] - values["low"]) * scale for _, values in points]
    above = [(values["high"] - values["median"]) * scale for _, values in points]
    heights = [height for height, _ in points]
    axes.errorbar(
        medians,
        heights,
        xerr=[below, above],
        fmt=MARKERS[number % len(MARKERS)],
        color=COLOURS[number % len(COLOURS)],
        markersize=4,
        linewidth=1,
        label=label,
    )
