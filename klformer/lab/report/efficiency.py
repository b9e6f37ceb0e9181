"""The benchmarks in the section on memory and speed: what was measured, figures, and tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from klformer.lab.bench.attention import QUANTITIES
from klformer.lab.bench.attention import length_table as attention_table
from klformer.lab.bench.model.output import length_table, speed_table
from klformer.lab.bench.peers import peer_table, subject_table
from klformer.lab.report.benchmark_figures import draw_attention_length, draw_model_length, draw_speed
from klformer.lab.report.benchmarks import Benchmark, Row
from klformer.lab.report.collect import Collection
from klformer.lab.report.drawing import Artist, Drawing
from klformer.lab.report.settings import attention_order, task_order
from klformer.lab.tables import Table, finite


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
    models = list(enumerate(collection.benchmarks_of("model")))
    attentions = enumerate(collection.benchmarks_of("attention"))
    peers = enumerate(collection.benchmarks_of("peers"))
    return Efficiency(
        speed=tuple(_speed(artist, place, found) for place, found in models if found.rows("speed")),
        model_length=tuple(_model_length(artist, place, found) for place, found in models if found.rows("length")),
        attention_length=tuple(
            _attention(artist, place, found) for place, found in attentions if found.rows("results")
        ),
        peers=tuple(_peers(place, found) for place, found in peers if found.rows("comparisons")),
    )


def _speed(artist: Artist, place: int, benchmark: Benchmark) -> View:
    groups: dict[str, list[Row]] = {}
    for row in benchmark.rows("speed"):
        same = [row["task"], row["length"], row.get("batch_size"), row.get("paper_batch_size")]
        groups.setdefault(repr(same), []).append(row)
    by_task = sorted(groups.values(), key=lambda rows: task_order(str(rows[0]["task"])))
    steps = finite((benchmark.content.get("options") or {}).get("steps"))
    timed = "" if steps is None else f" Timed steps in each process: {steps:,}."
    return View(
        about=f"{_rounds(benchmark)}{timed} Measured on {benchmark.about()}.",
        drawings=_known(draw_speed(artist, rows) for rows in by_task),
        tables=tuple(
            replace(speed_table(_in_order(rows, "attention")), name=f"speed-{place}-{number}")
            for number, rows in enumerate(by_task)
        ),
    )


def _model_length(artist: Artist, place: int, benchmark: Benchmark) -> View:
    rows = _in_order(benchmark.rows("length"), "attention")
    return View(
        about=f"{_rounds(benchmark)} Measured on {benchmark.about()}.",
        drawings=_known([draw_model_length(artist, rows)]),
        tables=(replace(length_table(rows), name=f"model-length-{place}", stacked=True),),
    )


def _rounds(benchmark: Benchmark) -> str:
    rounds = finite((benchmark.content.get("options") or {}).get("repeats"))
    if rounds == 1:
        return "Figures are of one process for each attention. There is no spread."
    processes = "several" if rounds is None else f"{rounds:,}"
    return f"Figures are medians of {processes} processes for each attention; small print: lowest to highest."


def _attention(artist: Artist, place: int, benchmark: Benchmark) -> View:
    rows = _in_order(benchmark.rows("results"), "name")
    measured = [quantity for quantity in QUANTITIES if any(row.get(quantity) for row in rows)]
    tables = {quantity: replace(attention_table(rows, quantity), name=f"{quantity}-{place}") for quantity in measured}
    first = tables.pop("seconds", None)
    return View(
        about=f"{_shape(benchmark)} Measured on {benchmark.about()}.",
        drawings=_known(draw_attention_length(artist, rows, quantity) for quantity in ("memory", "seconds")),
        tables=() if first is None else (first,),
        details=tuple(tables.values()),
    )


def _peers(place: int, benchmark: Benchmark) -> View:
    subjects, left_out = benchmark.rows("subjects"), benchmark.content.get("left_out")
    return View(
        about=f"{_shape(benchmark)} Measured on {benchmark.about()}.{f' {left_out}.' if left_out else ''}",
        tables=(replace(peer_table(benchmark.rows("comparisons")), name=f"peers-{place}"),),
        details=(replace(subject_table(subjects), name=f"peers-each-{place}"),) if subjects else (),
    )


def _in_order(rows: Sequence[Row], key: str) -> list[Row]:
    return sorted(rows, key=lambda row: attention_order(str(row[key])))


def _shape(benchmark: Benchmark) -> str:
    names = {
        "batch": "sequences B",
        "heads": "heads H",
        "head_dim": "size of a head D",
        "num_frequencies": "frequencies R",
        "num_layers": "layers of an encoder",
    }
    sizes = benchmark.content.get("sizes") or {}
    return f"Sizes: {', '.join(f'{name} = {sizes[key]}' for key, name in names.items() if key in sizes) or 'unknown'}."


def _known(drawings: Iterable[Drawing | None]) -> tuple[Drawing, ...]:
    return tuple(drawing for drawing in drawings if drawing is not None)
