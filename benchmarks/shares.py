"""Where the time of a step goes, by torch's profiler: shares of groups of operators.

`operator_shares` and `layer_shares` are the benchmarks. Every operator counts with its own time, without that of those
that it calls.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.launches import NO_LAUNCH
from klformer.lab.tables import MISSING, Table, number, percent

#: torch's operators by group, without the line below that marks those which work in place.
GROUPS: Mapping[str, Sequence[str]] = {
    "mm": ("mm", "addmm"),
    "bmm": ("bmm", "baddbmm"),
    "sines, cosines": ("sin", "cos"),
    "powers of two": ("exp2",),
    "sums, maxima": ("sum", "mean", "cumsum", "amax", "max", "_cummax_helper", "linalg_vector_norm"),
    "layer norms": ("native_layer_norm", "native_layer_norm_backward"),
    "GELU": ("gelu", "gelu_backward"),
    "copies": ("copy", "cat"),
}
#: Operators of torch that compute and are in no group; and the time between operators, Python's and torch's.
OTHER, CALLS = "other passes", "calls"
CAPTION = (
    "percent of the time of all operators, each without those that it calls; mm, bmm: matrix products,\n"
    "one by one and in batches; copies: copy and cat; other passes: the rest of what is done number by\n"
    "number; calls: views, allocations, and the time between operators, Python's and torch's"
)


def measure_shares(step: Callable[[], object], *, repeats: int) -> dict[str, Any]:
    """Seconds of a step under the profiler, and the share of every group in them.

    A group has the median of its steps: whatever runs when the machine does something else would seem to take long.
    """
    step()
    profiled = [_profiled(step) for _ in range(repeats + 1)][1:]  # the first one of a process is slower
    times = {group: statistics.median(found[group] for found in profiled) for group in profiled[0]}
    total = sum(times.values())
    return {"seconds": total, "shares": {group: seconds / total for group, seconds in times.items()}}


def _profiled(step: Callable[[], object]) -> dict[str, float]:
    """Seconds of every group in one step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    times = dict.fromkeys([*GROUPS, OTHER, CALLS], 0.0)
    for event in profiler.key_averages():
        times[group_of(event.key)] += event.self_cpu_time_total / 1e6
    return times


def group_of(operator: str) -> str:
    """The group of an operator that the profiler names."""
    library, _, name = operator.rpartition("::")
    name = name.removesuffix("_")
    found = next((group for group, names in GROUPS.items() if name in names), OTHER)
    return CALLS if library != "aten" or name in NO_LAUNCH else found


def share_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each subject: shares in percent, missing below one half."""
    lines = [
        {"": row["name"], "ms": number(row["seconds"] * 1e3, "{:,.0f}")}
        | {group: percent(share, "{:.0f}") if share >= 0.005 else MISSING for group, share in row["shares"].items()}
        for row in results
    ]
    return Table.of(lines, notes=[CAPTION])
