"""The tables and figures of `klformer bench model`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from klformer.lab.bench.attention import GROWTH_HINT, power_cell
from klformer.lab.bench.figures import lines_of, mebibytes, plot_speed
from klformer.lab.bench.measure import growth_power
from klformer.lab.plotting import MARKERS, line_style, plot_against_length, save
from klformer.lab.tables import Cell, Table, finite, interval, number, words
from klformer.lab.tasks import TASKS
from klformer.memory import MEBIBYTE

HINTS = {
    "steps / s": "of forward, backward and AdamW on random inputs of full length, default allocator",
    "processor s a step": "time of all threads",
    "relative to softmax": "seconds of softmax / seconds of this, of the same round; above 1 is faster",
    "relative, processor": "the same by processor time of all threads, which other work on the machine disturbs less",
    "MiB": "peak above model, optimiser and inputs",
}


def speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return speed and memory of a task's model with each attention, or the reason why it was not run."""
    lines = []
    for row in rows:
        reason, memory = row.get("not_run"), finite(row.get("memory"))
        skipped = Cell("not run", note=str(reason), wrap=True) if reason else None
        line = {
            "attention": words(row["attention"], code=True),
            "steps / s": skipped or interval(row.get("steps_per_second"), "{:.3g}"),
            "processor s a step": interval(row.get("processor"), "{:.3g}"),
            "relative to softmax": interval(row.get("relative")),
            "relative, processor": interval(row.get("relative_processor")),
            "MiB": number(None if skipped or memory is None else memory / MEBIBYTE, "{:,.0f}"),
        }
        lines.append(line)
    task = rows[0]["task"]
    return Table.of(lines, f"{task}: training steps of the whole model", notes=[_describe_step(rows[0])], hints=HINTS)


def _describe_step(row: Mapping[str, Any]) -> str:
    """Say how many examples and tokens a step has, and whose batch that is."""
    is_pair = row["task"] in TASKS and TASKS[row["task"]].is_pair
    batch, own = finite(row.get("batch_size")), finite(row.get("paper_batch_size"))
    what = (
        ("pair of sequences" if is_pair else "sequence")
        if batch == 1
        else ("pairs of sequences" if is_pair else "sequences")
    )
    preset = row.get("preset", "paper")
    whose = "the paper" if preset == "paper" else f"preset {preset}"
    reason = f"; {row['batch_note']}" if row.get("batch_note") else ""
    here, there = (number(size, "{:,.0f}").text for size in (batch, own))
    size = f"{here} {what}, as in {whose}," if batch == own else f"{here} {what} (in {whose} {there}{reason})"
    return f"A step has {size} of {row['length']:,} tokens."


def length_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return peak memory in MiB of a task's model by length, one sequence, and why some were not run."""
    lengths = sorted({row["length"] for row in rows})
    reasons = list(dict.fromkeys(str(row["not_run"]) for row in rows if row.get("not_run")))
    lines = []
    for name in dict.fromkeys(row["attention"] for row in rows):
        by_length = {row["length"]: row for row in rows if row["attention"] == name}
        line = {"attention": words(name, code=True)}
        measured: list[tuple[float, float]] = []
        for length in lengths:
            row = by_length.get(length, {})
            memory = finite(row.get("memory"))
            if row.get("not_run"):
                line[f"{length:,}"] = Cell("not run", note=str(1 + reasons.index(str(row["not_run"]))))
            else:
                line[f"{length:,}"] = number(memory and memory / MEBIBYTE, "{:,.0f}")
                measured += [(length, memory)] if memory else []
        line["grows as"] = power_cell(growth_power(*zip(*measured, strict=True)) if measured else None)
        lines.append(line)
    notes = [f"Not run ({place}): {reason}." for place, reason in enumerate(reasons, start=1)]
    task = rows[0]["task"] if rows else ""
    title = f"{task} model, one sequence: peak memory of a training step by length, MiB above model and optimiser"
    return Table.of(lines, title, notes=notes, hints={"grows as": GROWTH_HINT})


def draw_speed(report: dict[str, Any], *targets: Path) -> None:
    """Draw speed against memory, a panel for each task."""
    tasks = list(dict.fromkeys(row["task"] for row in report["speed"]))
    names = list(dict.fromkeys(row["attention"] for row in report["speed"]))

    def style(name: str) -> dict[str, Any]:
        number = names.index(name)
        return {"marker": MARKERS[number % len(MARKERS)], "label": name, **line_style(number)}

    figure, panels = plt.subplots(1, len(tasks), figsize=(3.6 * len(tasks) + 2, 4), layout="constrained", squeeze=False)
    for axes, task in zip(panels.flat, tasks, strict=True):
        rows = [row for row in report["speed"] if row["task"] == task]
        plot_speed(axes, rows, style)
        axes.set_title(f"{task}, batches of {rows[0]['batch_size']}")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), fontsize=8, loc="outside right center", frameon=False)
    where = report["environment"].get("device", report["environment"]["machine"])
    preset, date = report["options"].get("preset", "paper"), report["environment"]["date"]
    figure.suptitle(f"Training the models of preset {preset}: {where}, {date}", fontsize=10)
    save(figure, *targets)


def draw_length(report: dict[str, Any], *targets: Path) -> None:
    """Draw peak memory against the length, both on logarithmic axes."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    plot_against_length(axes, lines_of(report["length"], "attention", mebibytes))
    axes.set_ylabel("peak memory of a step, MiB above model and optimiser")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside right center", frameon=False)
    date = report["environment"]["date"]
    figure.suptitle(f"Memory against length: the Text model, one sequence, {date}", fontsize=10)
    save(figure, *targets)
