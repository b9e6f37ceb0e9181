"""What the rows of `klformer bench sequence` say, for tables: steps, traffic, and several processes beside one."""

from collections.abc import Mapping, Sequence
from typing import Any

from klformer.errors import ArgumentError
from klformer.lab.bench.measure import KEEP_FREED_MEMORY, spread, with_spread
from klformer.lab.environment import allocator_variables
from klformer.memory import MEBIBYTE


def step_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """What a step took, by heading."""
    return {
        "tokens": f"{row['length']:,}",
        "direction": "causal" if row["causal"] else "bidirectional",
        "processes": str(row["processes"]),
        "s a step": f"{row['seconds']:.2f}",
        "peak MiB a process": f"{row['peak_bytes'] / MEBIBYTE:,.0f}",
        "above the start": f"{row['peak_bytes_above_start'] / MEBIBYTE:,.0f}",
    }


def traffic_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """What the processes said to one another, in bytes by heading, and what the formulas predict: each to a layer, and
    all together through a network interface where that was counted."""
    cells = {
        "said a layer": f"{sum(row['counted_bytes_a_layer'].values()):,.0f}",
        "said a layer, predicted": f"{row['predicted_bytes_a_layer']:,.0f}",
    }
    if row["interface"] is not None:
        through, predicted = row["interface_bytes_a_step"], row["processes"] * row["predicted_bytes_sent_a_step"]
        cells[f"through {row['interface']} a step"] = f"{through:,.0f}"
        cells[f"through {row['interface']} a step, predicted"] = f"{predicted:,.0f}"
        cells["counted / predicted"] = f"{through / predicted:.2f}" if predicted else ""
    return cells


def traffic(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A line for every row: the sequence, and what was said."""
    return [
        {name: cell for name, cell in step_cells(row).items() if name in ("tokens", "direction", "processes")}
        | traffic_cells(row)
        for row in rows
    ]


def beside_one_process(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A line for every length, allocator and number of processes: medians over the commands that ran in turn, with the
    lowest and the highest, and beside one process. The first command of several processes is compared with the first of
    one process, and so on.

    Raises:
        ArgumentError: there are not as many rows of several processes as of one.
    """
    groups: dict[tuple[int, str], dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        by_count = groups.setdefault((row["length"], row["allocator"]), {})
        by_count.setdefault(row["processes"], []).append(row)
    lines = []
    for (length, allocator), by_count in groups.items():
        alone = by_count.get(1, [])
        for count, found in sorted(by_count.items()):
            if len(found) != len(alone):
                what = f"{length:,} tokens, {called(allocator)}: {len(found)} rows of {count} processes"
                raise ArgumentError(f"{what} and {len(alone)} of one; there must be as many")
            line = {
                "tokens": f"{length:,}",
                "allocator": called(allocator),
                "processes": str(count),
                "commands": str(len(found)),
                "s a step": with_spread(spread([row["seconds"] for row in found]), ".2f"),
                "times as fast": "",
                "peak MiB a process": with_spread(spread([row["peak_bytes"] for row in found]), ",.0f", 1 / MEBIBYTE),
                "of one process": "",
            }
            if count > 1:
                pairs = list(zip(alone, found, strict=True))
                line["times as fast"] = with_spread(
                    spread([one["seconds"] / row["seconds"] for one, row in pairs]), ".2f"
                )
                shares = [row["peak_bytes"] / one["peak_bytes"] for one, row in pairs]
                line["of one process"] = with_spread(spread(shares), ".2f")
            lines.append(line)
    return lines


def called(allocator: str) -> str:
    """Variables of glibc's allocator in words."""
    if not allocator:
        return "glibc's defaults"
    return "keeps freed memory" if allocator == allocator_variables(KEEP_FREED_MEMORY) else allocator
