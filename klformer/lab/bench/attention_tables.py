"""Tables of the rows of `klformer bench attention`: how time and memory grow, and who is faster than softmax."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from klformer.lab.bench.measure import crossover, growth_power
from klformer.lab.tables import MISSING, Cell, Table, finite, interval, number, words
from klformer.memory import MEBIBYTE

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
    """Return time in ms or memory in MiB of every attention, by length.

    Args:
        quantity: One of QUANTITIES.
    """
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
