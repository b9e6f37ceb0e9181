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
    as_flags,
    both_times,
    in_own_process,
    measured_with_kept_memory,
    spread,
    write_report,
)
from klformer.lab.bench.peer_modules import (
    Contender,
    Level,
    Pair,
    PeerMissingError,
    PeerSizes,
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


@dataclass(frozen=True)
class PeersBench:
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
    batch: int = 1
    """Sequences B."""
    heads: int = 8
    """Heads H."""
    head_dim: int = 64
    """Size D = E of queries, keys and values; an encoder has a model of H D and 4 H D hidden units."""
    num_frequencies: int = 128
    """Frequencies R of the kernels, the features of Performer."""
    num_layers: int = 2
    """Layers of the encoders."""
    repeats: int = 5
    """Rounds that are counted, after one to warm up."""
    slow_seconds: float = 5.0
    """Whoever takes longer than this to warm up has fewer rounds."""
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

    def sizes(self, length: int) -> PeerSizes:
        return PeerSizes(length, self.batch, self.heads, self.head_dim, self.num_frequencies, self.num_layers)

    def names(self) -> dict[Level, tuple[str, ...]]:
        """Attentions at each level."""
        return {level: self.attentions if level == "attention" else self.encoder_attentions for level in self.levels}


@dataclass(frozen=True)
class PeerMemory:
    """Print the extra peak memory of one contender in bytes; `peers` calls this in a new process for each."""

    contender: Contender
    sizes: PeerSizes


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
    compared = pairs(options.names())
    left_out = None
    without_performer = [pair for pair in compared if pair.peer.maker != "performer-pytorch"]
    if len(without_performer) < len(compared):
        try:
            performer_pytorch()
        except PeerMissingError as missing:
            compared, left_out = without_performer, str(missing)
            console.print(f"{left_out}.", markup=False, soft_wrap=True)
    subjects: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    again = measured_with_kept_memory("peers", options) if options.kept else None
    for length in options.lengths:
        sizes = options.sizes(length)
        errors = {pair: check_same(pair, sizes) for pair in compared if pair.same}
        times = _measure_time(compared, sizes, options, console)
        rounds = {contender: wall for contender, (wall, _) in times.items()}
        processes = range(options.memory_repeats if options.memory else 0)
        memory = {c: [_measure_memory(c, sizes, console) for _ in processes] for c in rounds}
        subjects += [_subject(c, sizes, *times[c], memory[c]) for c in times]
        comparisons += [_comparison(pair, sizes, errors.get(pair), rounds, memory) for pair in compared]
        if again is not None:
            _attach(subjects, again["subjects"], "seconds")
            _attach(comparisons, again["comparisons"], "time_ratio")
        shape = f"L={length:,} B={sizes.batch} H={sizes.heads} D=E={sizes.head_dim} R={sizes.num_frequencies}"
        for tabulate, rows in ((subject_table, subjects), (peer_table, comparisons)):
            table = tabulate([row for row in rows if row["length"] == length])
            replace(table, title=f"{table.title}, {shape}").print(console)
    found = {
        "sizes": asdict(options.sizes(0)) | {"length": list(options.lengths)},
        "subjects": subjects,
        "comparisons": comparisons,
        "left_out": left_out,
    }
    write_report(options.out and options.out / "peers.json", environment, found, console)


def _attach(rows: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]], field: str) -> None:
    """Put what was measured with freed memory kept beside what was not; both have the same rows in the same order."""
    for row, other in zip(rows, again, strict=False):
        row[f"{field}_kept"] = other[field]


def measure_memory(options: PeerMemory) -> None:
    """Print the extra peak memory in bytes; meant to be alone in its process."""
    small = PeerSizes(**{**asdict(options.sizes), "length": min(256, options.sizes.length)})
    forward_and_backward(options.contender, small)()
    print(extra_peak_memory(forward_and_backward(options.contender, options.sizes)))


def _measure_time(
    compared: Sequence[Pair], sizes: PeerSizes, options: PeersBench, console: Console
) -> dict[Contender, tuple[list[float], list[float]]]:
    """Seconds of the wall and of the processor, of all rounds."""
    contenders = dict.fromkeys(contender for pair in compared for contender in (pair.ours, pair.peer))
    with console.status(f"L={sizes.length:,}: time"):
        return both_times(
            {c: forward_and_backward(c, sizes) for c in contenders},
            repeats=options.repeats,
            slow_seconds=options.slow_seconds,
            slow_repeats=options.slow_repeats,
        )


def _measure_memory(contender: Contender, sizes: PeerSizes, console: Console) -> int:
    flags = as_flags(asdict(contender), "contender.") + as_flags(asdict(sizes), "sizes.")
    with console.status(f"L={sizes.length:,}: memory of {contender.label()}"):
        return int(in_own_process(["peers-memory", *flags]))


def _subject(
    contender: Contender,
    sizes: PeerSizes,
    seconds: Sequence[float],
    processor: Sequence[float],
    memory: Sequence[int],
) -> dict[str, Any]:
    who = {"name": contender.label(), **asdict(contender), "length": sizes.length}
    return who | {
        "rounds": len(seconds),
        "seconds": spread(seconds),
        "processor": spread(processor),
        "memory": spread(memory) if memory else None,
    }


def _comparison(
    pair: Pair,
    sizes: PeerSizes,
    errors: dict[str, float] | None,
    rounds: Mapping[Contender, Sequence[float]],
    memory: Mapping[Contender, Sequence[int]],
) -> dict[str, Any]:
    # Of two that have not as many rounds, the first ones were run side by side.
    both = zip(rounds[pair.peer], rounds[pair.ours], strict=False)
    ratios = [theirs / ours for theirs, ours in both]
    return {
        "peer": pair.peer.label(),
        "klformer": pair.ours.label(),
        "length": sizes.length,
        "errors": errors,
        "rounds": len(ratios),
        "time_ratio": spread(ratios),
        "memory_ratio": _memory_ratio(memory[pair.peer], memory[pair.ours]),
    }


def _memory_ratio(theirs: Sequence[int], ours: Sequence[int]) -> dict[str, float] | None:
    """The ratio of the medians, with the lowest and the highest of the pairs; None without memory to compare."""
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
