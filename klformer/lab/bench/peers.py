"""`klformer bench peers`: klformer beside what one would pick instead, with the same shapes and the same weights.

Results that should be the same are compared before anything is measured; `contenders` says who is compared with whom.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from klformer.attention import attention_names
from klformer.checks import check_choice, check_count
from klformer.lab.bench.measure import (
    both_times,
    in_own_process,
    spread,
    with_kept_memory,
    write_report,
)
from klformer.lab.bench.peer_modules import (
    Contender,
    Level,
    PeerMissingError,
    PeerShape,
    check_same,
    forward_and_backward,
    pairs,
    performer_pytorch,
)
from klformer.lab.environment import describe_machine
from klformer.lab.tables import MISSING, Cell, Table, interval, number, words
from klformer.lab.terminal import make_console
from klformer.memory import MEBIBYTE, extra_peak_memory

HINTS = {
    "difference": "relative RMS difference of results where the maths is the same; in brackets with the constant that "
    "performer-pytorch adds to each feature, which klformer does not",
    "time": "the peer's / klformer's: median of the rounds that both took part in; above 1 klformer is faster",
    "time, freed memory kept": "the same in processes that keep the memory they free",
    "memory": "the peer's / klformer's: medians of the peaks above the operands; above 1 klformer takes less",
    "rounds": "rounds in which time was taken; fewer for those that take long",
    "MiB": "peak above the operands",
}


@dataclass(frozen=True, kw_only=True)
class PeersBench(PeerShape):
    """Forward and backward beside torch and performer-pytorch: time, memory, and whether results are the same.

    Example: klformer bench peers --lengths 1024 4096 --out bench
    """

    attentions: tuple[str, ...] = (
        *("softmax", "performer", "gmm-rks", "fastfood-rks", "generative-rks"),
        *("gmm-prf", "fastfood-prf", "generative-prf", "atoms-prf"),
    )
    """Attentions of klformer that are compared by themselves."""
    encoder_attentions: tuple[str, ...] = ("softmax", "performer", "gmm-rks", "gmm-prf")
    """Attentions of klformer that are compared in an encoder; fewer by default, to bound the time."""
    lengths: tuple[int, ...] = (2048, 4096, 16384)
    """Lengths of the sequences."""
    levels: tuple[Level, ...] = ("attention", "encoder")
    """One attention, an encoder of some layers, or both."""
    repeats: int = 5
    """Rounds that are counted, after one to warm up."""
    slow_seconds: float = 5.0
    """What takes longer than this to warm up has fewer rounds."""
    slow_repeats: int = 2
    """Rounds that are counted for those."""
    memory: bool = True
    """Measure memory as well, each in processes of its own."""
    memory_repeats: int = 1
    """Processes for each in which memory is measured."""
    kept: bool = True
    """Measure time again in a process that keeps the memory that it frees."""
    out: Path | None = None
    """Folder for peers.json."""

    def names(self) -> dict[Level, tuple[str, ...]]:
        """Return attentions at each level."""
        return {level: self.attentions if level == "attention" else self.encoder_attentions for level in self.levels}


#: Rows of who was measured, rows of who was compared with whom, and a note on who was left out.
Found = tuple[list[dict[str, Any]], list[dict[str, Any]], str | None]


def run(options: PeersBench) -> None:
    """Check, measure, print the tables, and write the figures where they were asked for."""
    for option in ("attentions", "encoder_attentions"):
        for name in getattr(options, option):
            check_choice(option, name, attention_names())
    for option in ("repeats", "slow_repeats", "memory_repeats"):
        check_count(option, getattr(options, option))
    console = make_console(130)
    environment = describe_machine()
    console.print(f"klformer and its peers, {environment['date']}, {environment['machine']}")
    subjects, comparisons, left_out = measure(options, console)
    if options.kept:
        subjects_again, comparisons_again, _ = with_kept_memory(measure, options)
        for row, other in zip(subjects, subjects_again, strict=True):
            row["seconds_kept"] = other["seconds"]
        for row, other in zip(comparisons, comparisons_again, strict=True):
            row["time_ratio_kept"] = other["time_ratio"]
    for length in options.lengths:
        for tabulate, rows in ((subject_table, subjects), (peer_table, comparisons)):
            table = tabulate([row for row in rows if row["length"] == length])
            replace(table, title=f"{table.title}, L={length:,} {options.describe()}").print(console)
    sizes = options.as_dict() | {"length": list(options.lengths)}
    found = {"sizes": sizes, "subjects": subjects, "comparisons": comparisons, "left_out": left_out}
    write_report(options.out and options.out / "peers.json", environment, found, console)


def measure(options: PeersBench, console: Console | None = None) -> Found:
    """Compare results, then measure time and memory at every length."""
    console = console or Console(quiet=True)
    compared = pairs(options.names())
    left_out = None
    without_performer = [pair for pair in compared if pair.peer.maker != "performer-pytorch"]
    if len(without_performer) < len(compared):
        try:
            performer_pytorch()
        except PeerMissingError as missing:
            compared, left_out = without_performer, str(missing)
            console.print(f"{left_out}.", markup=False, soft_wrap=True)
    contenders = dict.fromkeys(contender for pair in compared for contender in (pair.ours, pair.peer))
    processes = range(options.memory_repeats if options.memory else 0)
    subjects: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    for length in options.lengths:
        errors = {pair: check_same(pair, options, length) for pair in compared if pair.same}
        with console.status(f"L={length:,}: time"):
            times = both_times(
                {contender: forward_and_backward(contender, options, length) for contender in contenders},
                repeats=options.repeats,
                slow_seconds=options.slow_seconds,
                slow_repeats=options.slow_repeats,
            )
        memory = {}
        for contender in contenders:
            with console.status(f"L={length:,}: memory of {contender.label()}"):
                memory[contender] = [in_own_process(measure_memory, contender, options, length) for _ in processes]
        for contender, (seconds, processor) in times.items():
            row = {"name": contender.label(), **asdict(contender), "length": length, "rounds": len(seconds)}
            row |= {"seconds": spread(seconds), "processor": spread(processor)}
            subjects.append(row | {"memory": spread(memory[contender]) if memory[contender] else None})
        for pair in compared:
            # Of two that have not as many rounds, the first ones were run side by side.
            both = zip(times[pair.peer][0], times[pair.ours][0], strict=False)
            ratios = [theirs / ours for theirs, ours in both]
            row = {"peer": pair.peer.label(), "klformer": pair.ours.label(), "length": length}
            row |= {"errors": errors.get(pair), "rounds": len(ratios), "time_ratio": spread(ratios)}
            comparisons.append(row | {"memory_ratio": _memory_ratio(memory[pair.peer], memory[pair.ours])})
    return subjects, comparisons, left_out


def measure_memory(contender: Contender, shape: PeerShape, length: int) -> int:
    """Return the extra peak memory in bytes; meant to be alone in its process."""
    forward_and_backward(contender, shape, min(256, length))()
    return extra_peak_memory(forward_and_backward(contender, shape, length))


def _memory_ratio(theirs: Sequence[int], ours: Sequence[int]) -> dict[str, float] | None:
    """Return the ratio of the medians, with the lowest and the highest of the pairs; None without memory to compare."""
    if not (theirs and all(ours)):
        return None
    pairwise = spread([peer / mine for peer, mine in zip(theirs, ours, strict=True)])
    return pairwise | {"median": statistics.median(theirs) / statistics.median(ours)}


def subject_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each of those that are compared."""
    lines = [
        {
            "": row["name"],
            "tokens": number(row["length"], "{:,}"),
            "ms": interval(row.get("seconds"), "{:,.1f}", 1e3),
            "processor ms": interval(row.get("processor"), "{:,.1f}", 1e3),
            "ms, freed memory kept": interval(row.get("seconds_kept"), "{:,.1f}", 1e3),
            "rounds": number(row.get("rounds"), "{:,}"),
            "MiB": interval(row.get("memory"), "{:,.0f}", 1 / MEBIBYTE),
        }
        for row in rows
    ]
    return Table.of(lines, "Forward and backward", hints=HINTS)


def peer_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each comparison."""
    lines = [
        {
            "peer": row["peer"],
            "klformer": words(row["klformer"], code=True),
            "tokens": number(row["length"], "{:,}"),
            "difference": _difference(row.get("errors")),
            "time": interval(row.get("time_ratio")),
            "time, freed memory kept": interval(row.get("time_ratio_kept")),
            "memory": interval(row.get("memory_ratio")),
            "rounds": number(row.get("rounds"), "{:,}"),
        }
        for row in rows
    ]
    return Table.of(lines, "Peers / klformer, forward and backward", hints=HINTS)


def _difference(errors: Mapping[str, object] | None) -> Cell:
    """Return a cell for the difference of results; missing where they are not meant to be the same."""
    plain, with_epsilon = (number((errors or {}).get(key), "{:.0e}") for key in ("error", "error_with_epsilon"))
    return plain if MISSING in (plain, with_epsilon) else replace(plain, note=with_epsilon.text)
