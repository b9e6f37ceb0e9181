"""`klformer bench attention`: time and memory of every attention against the length of the sequence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from rich.console import Console

from klformer.attention import AttentionSpec, attention_capabilities, attention_names, attention_options
from klformer.checks import check_choice
from klformer.errors import ArgumentError
from klformer.files import write_json
from klformer.lab.bench.figures import lines_of, mebibytes, milliseconds
from klformer.lab.bench.measure import (
    Shape,
    backends_of,
    both_times,
    crossover,
    describe_backends,
    growth_power,
    in_own_process,
    make_report,
    spread,
    with_kept_memory,
)
from klformer.lab.environment import describe_machine
from klformer.lab.plotting import plot_against_length, save
from klformer.lab.tables import MISSING, Cell, Table, finite, interval, number, words
from klformer.lab.terminal import make_console
from klformer.memory import MEBIBYTE, extra_peak_memory

#: In place of a crossover, where there is none because softmax is slower at every length.
EVERYWHERE = "everywhere"
#: What may be tabulated, with a title.
QUANTITIES: Mapping[str, str] = {
    "memory": "peak memory above the operands, MiB",
    "seconds": "time, default allocator, ms",
    "processor": "processor time of all threads, ms",
    "seconds_kept": "time, freed memory kept, ms",
}
GROWTH_HINT = "power of the length that fits best: 1 is linear, 2 quadratic"
HINTS = {
    "grows as": GROWTH_HINT,
    "faster than softmax": "length from which on it stays faster, on straight lines between measurements in logarithms",
}


def lengths_of(results: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the lengths from the shortest to the longest."""
    return sorted({row["length"] for row in results})


def names_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the attentions in the order in which they come."""
    return list(dict.fromkeys(row["name"] for row in results))


def values_of(results: Sequence[Mapping[str, Any]], name: str, quantity: str) -> list[float]:
    """Return seconds (medians) or bytes of an attention from the shortest length to the longest, 0 where unknown."""
    return [value or 0 for value in _measured(results, name, quantity)]


def _measured(results: Sequence[Mapping[str, Any]], name: str, quantity: str) -> list[float | None]:
    by_length = {row["length"]: row.get(quantity) for row in results if row["name"] == name}
    found = [by_length.get(length) for length in lengths_of(results)]
    return [finite(value if quantity == "memory" else (value or {}).get("median")) for value in found]


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how time and memory of every attention grow, and from which length on it is faster than softmax.

    Args:
        results: Rows with "name", "length", "seconds" and "memory"; all attentions have the same lengths.

    Returns:
        For each attention "time_slope" and "memory_slope", the powers of the length; "crossover", None where there is
        none; and "faster_than_softmax", the same in words, None for softmax itself and where softmax is not there.
    """
    lengths = lengths_of(results)
    seconds = {name: values_of(results, name, "seconds") for name in names_of(results)}
    summary = []
    for name, mine in seconds.items():
        cell = _beside_softmax(lengths, mine, None if name == "softmax" else seconds.get("softmax"))
        summary.append(
            {
                "name": name,
                "time_slope": growth_power(lengths, mine),
                "memory_slope": growth_power(lengths, values_of(results, name, "memory")),
                "crossover": cell.sort or None,
                "faster_than_softmax": None if cell == MISSING else cell.text,
            }
        )
    return summary


def _beside_softmax(lengths: Sequence[int], seconds: Sequence[float], softmax: Sequence[float] | None) -> Cell:
    """Return from which length on an attention is faster; 0 if it is so everywhere."""
    if softmax is None or not all((*seconds, *softmax)):
        return MISSING
    length = crossover(lengths, seconds, softmax)
    if length is None:
        return Cell(f"not up to {lengths[-1]:,}")
    return Cell(EVERYWHERE, 0.0) if length == lengths[0] else Cell(f"from about {length:,.0f}", length)


def length_table(results: Sequence[Mapping[str, Any]], quantity: str = "seconds") -> Table:
    """Return time in ms or memory in MiB of every attention, by length."""
    lengths = lengths_of(results)
    values = {name: values_of(results, name, quantity) for name in names_of(results)}
    rows = {name: {row["length"]: row for row in results if row["name"] == name} for name in values}
    lines = []
    for name, mine in values.items():
        scale = 1 / MEBIBYTE if quantity == "memory" else 1e3
        line: dict[str, Cell] = {"attention": words(name, code=True)}
        for length, value in zip(lengths, _measured(results, name, quantity), strict=True):
            line[f"L={length:,}"] = number(None if value is None else value * scale, "{:,.0f}")
        longest = rows[name].get(lengths[-1], {})
        if quantity == "memory":
            line |= _of_memory(lengths, mine, longest)
        else:
            spread = interval(longest.get(quantity), "{:,.0f}", 1e3)
            line["lowest to highest, longest"] = Cell(spread.note, spread.sort) if spread.note else MISSING
            line |= _of_time(lengths, values, name)
        lines.append(line)
    return Table.of(lines, QUANTITIES[quantity], hints=HINTS)


def _of_time(lengths: Sequence[int], values: Mapping[str, Sequence[float]], name: str) -> dict[str, Cell]:
    mine, softmax = values[name], values.get("softmax")
    gain = softmax[-1] / mine[-1] if softmax and mine[-1] else None
    return {
        "grows as": power_cell(growth_power(lengths, mine)),
        "faster than softmax": _beside_softmax(lengths, mine, None if name == "softmax" else softmax),
        "softmax / it, longest": number(gain or None, "{:.1f}x"),
    }


def _of_memory(lengths: Sequence[int], mine: Sequence[float], longest: Mapping[str, Any]) -> dict[str, Cell]:
    line = {"grows as": power_cell(growth_power(lengths, mine))}
    for shorter, longer in list(pairwise(lengths))[-1:]:
        growth = mine[-1] / mine[-2] if mine[-2] else None
        line[f"growth, {shorter:,} to {longer:,}"] = number(growth or None, "{:.1f}x")
    least = finite(longest.get("result_and_gradients"))
    line["of result and gradients, longest"] = number(mine[-1] / least if least else None, "{:.2f}x")
    return line


def power_cell(power: float | None) -> Cell:
    """Return a cell for the power of the length as which something grows."""
    return number(power, "L^{:.2f}")


CAPTION = "Forward and backward of attentions against the length: seconds, and bytes of memory above the operands."


@dataclass(frozen=True, kw_only=True)
class AttentionBench(Shape):
    """Forward and backward of every attention: time as medians of interleaved rounds, memory in processes of their own.

    Example: klformer bench attention --lengths 1024 4096 --out bench
    """

    attentions: tuple[str, ...] = field(default_factory=lambda: tuple(attention_names()))
    """Names, perhaps with options, like gmm-prf:num_frequencies=32,window=8; all by default. Options that are not given
    are the defaults, which are Long Range Arena's."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    """Lengths of the sequences, from short to long."""
    repeats: int = 3
    """Rounds that are counted."""
    memory: bool = True
    """Measure memory as well."""
    kept: bool = True
    """Measure time again in a process that keeps the memory that it frees."""
    out: Path | None = None
    """Folder for attention.json, attention.svg and attention.png."""


def run(options: AttentionBench) -> None:
    """Measure, print the tables, and write the figures where they were asked for."""
    for name in options.attentions:
        check_choice("attentions", name.partition(":")[0], attention_names())
        AttentionSpec.parse(name)  # also its options are known
    if list(options.lengths) != sorted(set(options.lengths)) or not options.lengths:
        raise ArgumentError(f"lengths must rise, got {options.lengths}")
    console = make_console(140)
    environment = describe_machine()
    console.print(f"klformer attention benchmark, {environment['date']}, {environment['machine']}")
    results = measure(options, console)
    if options.kept:
        for row, again in zip(results, with_kept_memory(measure, options), strict=True):
            row["seconds_kept"] = again["seconds"]
    found = {"sizes": options.as_dict(), "results": results, "summary": summarise(results)}
    report = make_report(environment, {"caption": CAPTION, **found})
    measured = {"memory": options.memory, "seconds_kept": options.kept}
    for quantity in QUANTITIES:
        if measured.get(quantity, True):
            rounds = f"medians of {options.repeats} rounds"
            note = "in processes that give memory back at once" if quantity == "memory" else rounds
            table = length_table(results, quantity)
            title = f"forward + backward, {table.title}, {options.describe()}"
            replace(table, title=title, notes=(f"{note}; {environment['machine']}",)).print(console)
    console.print(describe_backends(results), highlight=False)
    if options.out is not None:
        write_json(options.out / "attention.json", report)
        draw(report, options.out / "attention.svg", options.out / "attention.png")
        console.print(f"figures written to {options.out}")


def measure_memory(name: str, shape: Shape, length: int) -> int:
    """Return the extra peak memory in bytes; meant to be alone in its process."""
    forward_and_backward(name, shape, 256)()
    return extra_peak_memory(forward_and_backward(name, shape, length))


def forward_and_backward(name: str, shape: Shape, length: int) -> Callable[[], None]:
    """Return one training step's worth of an attention: the result and the gradients of operands and parameters."""
    torch.manual_seed(0)
    spec = AttentionSpec.parse(name)
    chosen = {"num_frequencies": shape.num_frequencies} if "num_frequencies" in attention_options(spec.name) else {}
    spec = AttentionSpec(name=spec.name, options=chosen | spec.options)
    mechanism = spec.build(num_heads=shape.heads, head_dim=shape.head_dim, max_len=length)
    q, k, v, d_out = (torch.randn(shape.batch, shape.heads, length, shape.head_dim) for _ in range(4))
    wanted = [v.requires_grad_(), *mechanism.parameters()]
    if mechanism.uses_queries:
        wanted.append(q.requires_grad_())
    if mechanism.uses_keys:
        wanted.append(k.requires_grad_())

    def step() -> None:
        torch.autograd.grad(mechanism(q, k, v), wanted, d_out)

    return step


def measure(options: AttentionBench, console: Console | None = None) -> list[dict[str, Any]]:
    """Return a row for each length and attention."""
    console = console or Console(quiet=True)
    return [row for length in options.lengths for row in _measure_at(options, length, console)]


def _measure_at(options: AttentionBench, length: int, console: Console) -> list[dict[str, Any]]:
    subjects = {name: forward_and_backward(name, options, length) for name in options.attentions}
    with console.status(f"L={length:,}: time"):
        times = both_times(subjects, repeats=options.repeats)
    served = {name: backends_of(step) for name, step in subjects.items()}
    del subjects
    results = []
    for name, (seconds, processor) in times.items():
        memory = None
        if options.memory:
            with console.status(f"L={length:,}: memory of {name}"):
                memory = in_own_process(measure_memory, name, options, length)
        clocks = {"seconds": spread(seconds), "processor": spread(processor)}
        least = result_and_gradients(name, options, length)
        row = {"name": name, "length": length, **clocks, "memory": memory, "result_and_gradients": least}
        results.append(row | {"backends": served[name]})
    return results


def result_and_gradients(name: str, shape: Shape, length: int) -> int:
    """Return the bytes of what `forward_and_backward` has to hand out, but for the gradients of parameters: the result,
    and the gradients of the values and of those of queries and keys that the attention looks at."""
    can = attention_capabilities(AttentionSpec.parse(name).name)
    tensors = 2 + can.uses_queries + can.uses_keys
    return tensors * shape.batch * shape.heads * length * shape.head_dim * torch.float32.itemsize


def draw(report: dict[str, Any], *targets: Path) -> None:
    """Draw time and memory against the length, both on logarithmic axes."""
    lines = {
        "time, ms": lines_of(report["results"], "name", milliseconds),
        "memory, MiB above the operands": lines_of(report["results"], "name", mebibytes),
    }
    shown = {label: found for label, found in lines.items() if found}
    figure, panels = plt.subplots(
        1, len(shown), figsize=(5.2 * len(shown) + 1.8, 5), layout="constrained", squeeze=False
    )
    for axes, (label, found) in zip(panels.flat, shown.items(), strict=True):
        plot_against_length(axes, found)
        axes.set_ylabel(label)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center", frameon=False)
    sizes = report["sizes"]
    figure.suptitle(
        f"Forward and backward of one attention: H={sizes['heads']}, D={sizes['head_dim']}, "
        f"R={sizes['num_frequencies']}, {report['environment']['date']}",
        fontsize=10,
    )
    save(figure, *targets)
