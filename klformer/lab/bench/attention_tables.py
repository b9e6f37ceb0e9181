"""What the rows of `klformer bench attention` say, for tables: how time and memory grow, and who is beside softmax."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from klformer.lab.bench.measure import crossover, growth_power, show_power
from klformer.memory import MEBIBYTE

#: In place of a crossover, where there is none because softmax is slower at every length.
EVERYWHERE = "everywhere"


def lengths_of(results: Sequence[Mapping[str, Any]]) -> list[int]:
    """From the shortest to the longest."""
    return sorted({row["length"] for row in results})


def names_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The attentions in the order in which they come."""
    return list(dict.fromkeys(row["name"] for row in results))


def values_of(results: Sequence[Mapping[str, Any]], name: str, quantity: str) -> list[float]:
    """Seconds (medians) or bytes of an attention from the shortest length to the longest, 0 where there is none."""
    rows = sorted((row for row in results if row["name"] == name), key=lambda row: row["length"])
    return [row["memory"] or 0 if quantity == "memory" else row[quantity]["median"] for row in rows]


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How time and memory of every attention grow with the length, and from which length on it is faster than softmax.

    Args:
        results: Rows with "name", "length", "seconds" and "memory"; all attentions have the same lengths.

    Returns:
        For each attention "time_slope" and "memory_slope", the powers of the length; "crossover", None where there is
        none; and "faster_than_softmax", the same in words, None for softmax itself and where softmax is not there.
    """
    lengths = lengths_of(results)
    seconds = {name: values_of(results, name, "seconds") for name in names_of(results)}
    return [
        {
            "name": name,
            "time_slope": growth_power(lengths, seconds[name]),
            "memory_slope": growth_power(lengths, values_of(results, name, "memory")),
            **_beside_softmax(lengths, seconds[name], None if name == "softmax" else seconds.get("softmax")),
        }
        for name in seconds
    ]


def _beside_softmax(
    lengths: Sequence[int], seconds: Sequence[float], softmax: Sequence[float] | None
) -> dict[str, float | str | None]:
    if softmax is None:
        return {"crossover": None, "faster_than_softmax": None}
    length = crossover(lengths, seconds, softmax)
    if length is None:
        return {"crossover": None, "faster_than_softmax": f"not up to {lengths[-1]:,}"}
    if length == lengths[0]:
        return {"crossover": None, "faster_than_softmax": EVERYWHERE}
    return {"crossover": length, "faster_than_softmax": f"from about {length:,.0f}"}


def time_columns(results: Sequence[Mapping[str, Any]], quantity: str = "seconds") -> dict[str, list[str]]:
    """Columns of a table of times in ms, each with a cell for every attention.

    Args:
        quantity: "seconds", "processor" (time of all threads) or "seconds_kept" (where freed memory is kept).
    """
    lengths = lengths_of(results)
    seconds = {name: values_of(results, name, quantity) for name in names_of(results)}
    columns = _by_length(lengths, seconds, 1e3)
    longest = [row[quantity] for row in results if row["length"] == lengths[-1]]
    if all("low" in spread for spread in longest):
        columns["lowest to highest, longest"] = [
            f"{spread['low'] * 1e3:,.0f} to {spread['high'] * 1e3:,.0f}" for spread in longest
        ]
    columns["grows as"] = [show_power(growth_power(lengths, values)) for values in seconds.values()]
    if softmax := seconds.get("softmax"):
        others = {name: None if name == "softmax" else softmax for name in seconds}
        beside = [_beside_softmax(lengths, values, others[name]) for name, values in seconds.items()]
        columns["faster than softmax"] = [str(found["faster_than_softmax"] or "") for found in beside]
        columns["softmax / it, longest"] = [f"{softmax[-1] / values[-1]:.1f}x" for values in seconds.values()]
    return columns


def memory_columns(results: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Columns of a table of memory in MiB, each with a cell for every attention."""
    lengths = lengths_of(results)
    memory = {name: values_of(results, name, "memory") for name in names_of(results)}
    columns = _by_length(lengths, memory, 1 / MEBIBYTE)
    columns["grows as"] = [show_power(growth_power(lengths, values)) for values in memory.values()]
    for shorter, longer in list(pairwise(lengths))[-1:]:
        ratios = (values[-1] / values[-2] if values[-2] else 0 for values in memory.values())
        columns[f"growth, {shorter:,} to {longer:,}"] = [f"{ratio:.1f}x" if ratio else "" for ratio in ratios]
    least = [row["result_and_gradients"] for row in results if row["length"] == lengths[-1]]
    shares = (values[-1] / bytes_ for values, bytes_ in zip(memory.values(), least, strict=True))
    columns["of result and gradients, longest"] = [f"{share:.2f}x" for share in shares]
    return columns


def _by_length(lengths: Sequence[int], values: Mapping[str, Sequence[float]], scale: float) -> dict[str, list[str]]:
    return {
        f"L={length:,}": [f"{mine[place] * scale:,.0f}" for mine in values.values()]
        for place, length in enumerate(lengths)
    }
