"""Tables of the docs on trials that decided something and on the demonstration, of the rows that commands wrote.

fastfood-blocks  FastFood's two ways to project a token, in time (`bench fastfood`)
denominators     how often a denominator is negative, by smoothing (`bench denominators`)
sequence-steps   time and memory of steps with sequences in parts (`klformer bench sequence`)
traffic          what the processes of such steps say to one another, counted and predicted
processes        such steps on several processes beside one
demo             what is kept of a model whose attention is replaced (`klformer demo`)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.denominators import denominator_table
from benchmarks.fastfood import fastfood_table
from klformer.errors import ArgumentError
from klformer.lab.analysis.cells import Row
from klformer.lab.bench.measure import KEEP_FREED_MEMORY, spread
from klformer.lab.bench.sequence import step_line, traffic_line
from klformer.lab.cli.demo import demo_table
from klformer.lab.environment import allocator_variables
from klformer.lab.tables import MISSING, Table, Tabulate, interval, number
from klformer.memory import MEBIBYTE


def _as_printed(tabulate: Tabulate) -> Callable[[Sequence[Row]], str]:
    return lambda rows: tabulate(rows).as_markdown()


def _steps(rows: Sequence[Row]) -> Table:
    return Table.of([step_line(row) for row in rows])


def _traffic(rows: Sequence[Row]) -> Table:
    shown = ("tokens", "direction", "processes")
    return Table.of([{key: step_line(row)[key] for key in shown} | traffic_line(row) for row in rows])


def beside_one_process(rows: Sequence[Mapping[str, Any]]) -> Table:
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
            line: dict[str, object] = {
                "tokens": number(length, "{:,}"),
                "allocator": called(allocator),
                "processes": count,
                "commands": len(found),
                "s a step": interval(spread([row["seconds"] for row in found])),
                "times as fast": MISSING,
                "peak MiB a process": interval(spread([row["peak_bytes"] for row in found]), "{:,.0f}", 1 / MEBIBYTE),
                "of one process": MISSING,
            }
            if count > 1:
                pairs = list(zip(alone, found, strict=True))
                line["times as fast"] = interval(spread([one["seconds"] / row["seconds"] for one, row in pairs]))
                shares = [row["peak_bytes"] / one["peak_bytes"] for one, row in pairs]
                line["of one process"] = interval(spread(shares))
            lines.append(line)
    return Table.of(lines)


def called(allocator: str) -> str:
    """Variables of glibc's allocator in words."""
    if not allocator:
        return "glibc's defaults"
    return "keeps freed memory" if allocator == allocator_variables(KEEP_FREED_MEMORY) else allocator


TRIALS: Mapping[str, Callable[..., str]] = {
    "fastfood-blocks": _as_printed(fastfood_table),
    "denominators": _as_printed(denominator_table),
    "sequence-steps": _as_printed(_steps),
    "traffic": _as_printed(_traffic),
    "processes": _as_printed(beside_one_process),
    "demo": _as_printed(demo_table),
}
