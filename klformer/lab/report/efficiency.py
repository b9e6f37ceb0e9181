"""The benchmarks in the section on memory and speed: what was measured, figures, and tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from klformer.lab.report.benchmark_figures import draw_attention_length, draw_model_length, draw_speed
from klformer.lab.report.benchmark_tables import (
    attention_table,
    comparison_table,
    growth_table,
    model_length_table,
    speed_table,
    subject_table,
)
from klformer.lab.report.benchmarks import AttentionBenchmark, ModelBenchmark, ModelRow, PeerBenchmark
from klformer.lab.report.collect import Collection
from klformer.lab.report.drawing import Artist, Drawing
from klformer.lab.report.settings import task_order
from klformer.lab.report.tables import Table


@dataclass(frozen=True)
class View:
    """One benchmark, or a part of it."""

    about: str
    drawings: tuple[Drawing, ...] = ()
    #: Tables to be seen, and tables for those who want to know more.
    tables: tuple[Table, ...] = ()
    details: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Efficiency:
    """All benchmarks, by what they tell."""

    speed: tuple[View, ...]
    model_length: tuple[View, ...]
    attention_length: tuple[View, ...]
    peers: tuple[View, ...]

    def drawings(self) -> list[Drawing]:
        views = (*self.speed, *self.model_length, *self.attention_length, *self.peers)
        return [drawing for view in views for drawing in view.drawings]


def make_efficiency(collection: Collection, artist: Artist) -> Efficiency:
    """Draw and tabulate the benchmarks; a kind that nothing was measured of has no view."""
    models = list(enumerate(collection.model_benchmarks))
    attentions = enumerate(collection.attention_benchmarks)
    peers = enumerate(collection.peer_benchmarks)
    return Efficiency(
        speed=tuple(_speed(artist, number, benchmark) for number, benchmark in models if benchmark.speed),
        model_length=tuple(
            _model_length(artist, number, benchmark) for number, benchmark in models if benchmark.length
        ),
        attention_length=tuple(
            _attention(artist, number, benchmark) for number, benchmark in attentions if benchmark.rows
        ),
        peers=tuple(_peers(number, benchmark) for number, benchmark in peers if benchmark.comparisons),
    )


def _speed(artist: Artist, number: int, benchmark: ModelBenchmark) -> View:
    groups: dict[tuple[object, ...], list[ModelRow]] = {}
    for row in benchmark.speed:
        groups.setdefault((row.task, row.batch_size, row.paper_batch_size, row.length), []).append(row)
    by_task = sorted(groups.values(), key=lambda rows: task_order(rows[0].task))
    steps = "" if benchmark.steps is None else f" Timed steps in each process: {benchmark.steps:,}."
    return View(
        about=f"{_rounds(benchmark)}{steps} Measured on {benchmark.origin}.",
        drawings=_known(draw_speed(artist, rows) for rows in by_task),
        tables=tuple(speed_table(f"speed-{number}-{place}", rows) for place, rows in enumerate(by_task)),
    )


def _model_length(artist: Artist, number: int, benchmark: ModelBenchmark) -> View:
    return View(
        about=f"{_rounds(benchmark)} Measured on {benchmark.origin}.",
        drawings=_known([draw_model_length(artist, benchmark)]),
        tables=(model_length_table(f"model-length-{number}", benchmark),),
    )


def _rounds(benchmark: ModelBenchmark) -> str:
    if benchmark.rounds == 1:
        return "Figures are of one process for each attention. There is no spread."
    processes = "several" if benchmark.rounds is None else f"{benchmark.rounds:,}"
    return f"Figures are medians of {processes} processes for each attention; small print: lowest to highest."


def _attention(artist: Artist, number: int, benchmark: AttentionBenchmark) -> View:
    return View(
        about=f"{_shape(benchmark.sizes)} Measured on {benchmark.origin}.",
        drawings=_known(draw_attention_length(artist, benchmark, quantity) for quantity in ("memory", "seconds")),
        tables=(growth_table(f"growth-{number}", benchmark),) if benchmark.summary else (),
        details=(attention_table(f"bench-{number}", benchmark),),
    )


def _peers(number: int, benchmark: PeerBenchmark) -> View:
    left_out = f" {benchmark.left_out}." if benchmark.left_out else ""
    return View(
        about=f"{_shape(benchmark.sizes)} Measured on {benchmark.origin}.{left_out}",
        tables=(comparison_table(f"peers-{number}", benchmark),),
        details=(subject_table(f"peers-each-{number}", benchmark),) if benchmark.subjects else (),
    )


def _shape(sizes: Mapping[str, Any]) -> str:
    names = {
        "batch": "sequences B",
        "heads": "heads H",
        "head_dim": "size of a head D",
        "num_frequencies": "frequencies R",
        "num_layers": "layers of an encoder",
    }
    return f"Sizes: {', '.join(f'{name} = {sizes[key]}' for key, name in names.items() if key in sizes) or 'unknown'}."


def _known(drawings: Iterable[Drawing | None]) -> tuple[Drawing, ...]:
    return tuple(drawing for drawing in drawings if drawing is not None)
