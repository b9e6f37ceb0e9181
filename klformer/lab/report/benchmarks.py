"""What `klformer bench` wrote: attentions, whole models, and peers, as plain data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError
from klformer.files import read_json
from klformer.lab.report.reading import finite, rows_of


@dataclass(frozen=True)
class Spread:
    """The median of several rounds, with the lowest and the highest where they are known."""

    median: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Origin:
    """When and where something was measured."""

    date: str
    machine: str

    def __str__(self) -> str:
        return ", ".join(part for part in (self.machine, self.date) if part) or "machine and date unknown"


@dataclass(frozen=True)
class AttentionRow:
    """Forward and backward of one attention at one length."""

    name: str
    length: float
    seconds: Spread | None
    memory: float | None
    #: In a process that keeps the memory that it frees; None where that was not measured.
    seconds_kept: Spread | None


@dataclass(frozen=True)
class AttentionSummary:
    """How an attention grows with the length, as powers of it, and from which length on it is faster than softmax."""

    name: str
    memory_slope: float | None
    time_slope: float | None
    #: The length, where there is one, and the same in words.
    crossover: float | None
    faster_than_softmax: str


@dataclass(frozen=True)
class AttentionBenchmark:
    """Time and memory of attentions against the length, as `klformer bench attention` wrote them."""

    origin: Origin
    sizes: Mapping[str, Any]
    rows: tuple[AttentionRow, ...]
    summary: tuple[AttentionSummary, ...]


@dataclass(frozen=True)
class ModelRow:
    """Training steps of one model with one attention; without figures there is a reason."""

    task: str
    attention: str
    length: float
    batch_size: float | None
    paper_batch_size: float | None
    #: Why the batch is not the paper's, if there is a reason.
    batch_note: str
    #: Steps a second, the same relative to softmax, and bytes above model, optimiser and inputs.
    speed: Spread | None
    relative: Spread | None
    #: The same by processor time of all threads, which other work on the machine disturbs less.
    relative_processor: Spread | None
    memory: float | None
    not_run: str


@dataclass(frozen=True)
class ModelBenchmark:
    """Speed and memory of whole models, and memory against the length, as `klformer bench model` wrote them."""

    origin: Origin
    #: Processes for each attention, and steps that were timed in each.
    rounds: float | None
    steps: float | None
    speed: tuple[ModelRow, ...]
    length: tuple[ModelRow, ...]


@dataclass(frozen=True)
class Comparison:
    """A peer and klformer's counterpart: ratios of the peer's figures to klformer's."""

    peer: str
    ours: str
    length: float
    time: Spread | None
    #: In a process that keeps the memory that it frees; None where that was not measured.
    time_kept: Spread | None
    #: Rounds that both took part in.
    rounds: float | None
    memory: Spread | None
    #: Relative difference of results that should be the same; None if the two compute different things.
    error: float | None
    #: The same with the constant that performer-pytorch adds to its features.
    error_with_epsilon: float | None


@dataclass(frozen=True)
class Subject:
    """One of those that are compared."""

    name: str
    length: float
    seconds: Spread | None
    rounds: float | None
    memory: Spread | None


@dataclass(frozen=True)
class PeerBenchmark:
    """klformer beside other libraries, as `klformer bench peers` wrote it."""

    origin: Origin
    sizes: Mapping[str, Any]
    comparisons: tuple[Comparison, ...]
    subjects: tuple[Subject, ...]
    #: Which peer was not measured, and why; empty if all were.
    left_out: str


Benchmark = AttentionBenchmark | ModelBenchmark | PeerBenchmark


def read_benchmark(path: Path) -> Benchmark:
    """Read any of the benchmarks; what it is, its content says.

    Raises:
        ValueError: the file can't be read, or is none of them.
    """
    content = read_json(path)
    for key, read in _READERS.items():
        if key in content:
            return read(content, path)
    raise ArgumentError(
        f"{path} is not a benchmark of attentions, models or peers: it has none of {', '.join(_READERS)}"
    )


def _read_attention(content: Mapping[str, Any], path: Path) -> AttentionBenchmark:
    rows = tuple(
        AttentionRow(
            name=str(row["name"]),
            length=_length(row, path),
            seconds=_spread(row, "seconds", path),
            memory=finite(row.get("memory")),
            seconds_kept=_spread(row, "seconds_kept", path),
        )
        for row in rows_of(content, "results", ("name", "length"), path)
    )
    summary = tuple(
        AttentionSummary(
            name=str(row["name"]),
            memory_slope=finite(row.get("memory_slope")),
            time_slope=finite(row.get("time_slope")),
            crossover=finite(row.get("crossover")),
            faster_than_softmax=str(row.get("faster_than_softmax") or ""),
        )
        for row in rows_of(content, "summary", ("name",), path)
    )
    return AttentionBenchmark(_origin(content, path), _object(content, "sizes", path), rows, summary)


def _read_model(content: Mapping[str, Any], path: Path) -> ModelBenchmark:
    options = _object(content, "options", path)
    needed = ("task", "attention", "length")
    return ModelBenchmark(
        origin=_origin(content, path),
        rounds=finite(options.get("repeats")),
        steps=finite(options.get("steps")),
        speed=tuple(_model_row(row, path) for row in rows_of(content, "speed", needed, path)),
        length=tuple(_model_row(row, path) for row in rows_of(content, "length", needed, path)),
    )


def _model_row(row: Mapping[str, Any], path: Path) -> ModelRow:
    return ModelRow(
        task=str(row["task"]),
        attention=str(row["attention"]),
        length=_length(row, path),
        batch_size=finite(row.get("batch_size")),
        paper_batch_size=finite(row.get("paper_batch_size")),
        batch_note=str(row.get("batch_note") or ""),
        speed=_spread(row, "steps_per_second", path),
        relative=_spread(row, "relative", path),
        relative_processor=_spread(row, "relative_processor", path),
        memory=finite(row.get("memory")),
        not_run="" if row.get("not_run") is None else str(row["not_run"]),
    )


def _read_peers(content: Mapping[str, Any], path: Path) -> PeerBenchmark:
    comparisons = rows_of(content, "comparisons", ("peer", "klformer", "length"), path)
    subjects = rows_of(content, "subjects", ("name", "length"), path)
    return PeerBenchmark(
        origin=_origin(content, path),
        sizes=_object(content, "sizes", path),
        comparisons=tuple(_comparison(row, path) for row in comparisons),
        subjects=tuple(_subject(row, path) for row in subjects),
        left_out=str(content.get("left_out") or ""),
    )


def _subject(row: Mapping[str, Any], path: Path) -> Subject:
    return Subject(
        name=str(row["name"]),
        length=_length(row, path),
        seconds=_spread(row, "seconds", path),
        rounds=finite(row.get("rounds")),
        memory=_spread(row, "memory", path),
    )


def _comparison(row: Mapping[str, Any], path: Path) -> Comparison:
    errors = _object(row, "errors", path)
    return Comparison(
        peer=str(row["peer"]),
        ours=str(row["klformer"]),
        length=_length(row, path),
        time=_spread(row, "time_ratio", path),
        time_kept=_spread(row, "time_ratio_kept", path),
        rounds=finite(row.get("rounds")),
        memory=_spread(row, "memory_ratio", path),
        error=finite(errors.get("error")),
        error_with_epsilon=finite(errors.get("error_with_epsilon")),
    )


def _object(content: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    """An object, empty if there is none."""
    found = {} if content.get(key) is None else content[key]
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} is not a benchmark: {key} must be an object, got {found!r}")
    return found


def _origin(content: Mapping[str, Any], path: Path) -> Origin:
    environment = _object(content, "environment", path)
    machine = environment.get("device", environment.get("machine", ""))
    return Origin(str(environment.get("date", "")), str(machine))


def _length(row: Mapping[str, Any], path: Path) -> float:
    length = finite(row["length"])
    if length is None or length <= 0:
        raise ArgumentError(f"{path} is not a benchmark: length must be a positive number, got {row['length']!r}")
    return length


def _spread(row: Mapping[str, Any], key: str, path: Path) -> Spread | None:
    found = _object(row, key, path)
    median = finite(found.get("median"))
    return None if median is None else Spread(median, finite(found.get("low")), finite(found.get("high")))


_READERS: dict[str, Callable[[Mapping[str, Any], Path], Benchmark]] = {
    "results": _read_attention,
    "speed": _read_model,
    "comparisons": _read_peers,
}
