"""The tables of benchmarks: whole models, single attentions, and klformer beside its peers."""

from collections.abc import Callable, Sequence

from klformer.lab.bench.attention_tables import EVERYWHERE
from klformer.lab.bench.measure import growth_power, show_power
from klformer.lab.bench.peer_modules import TOLERANCE
from klformer.lab.report.benchmarks import (
    AttentionBenchmark,
    AttentionSummary,
    Comparison,
    ModelBenchmark,
    ModelRow,
    PeerBenchmark,
    Spread,
)
from klformer.lab.report.paper_numbers import task_title
from klformer.lab.report.settings import attention_order
from klformer.lab.report.tables import MISSING, Cell, Column, Table, number, words
from klformer.lab.tasks import TASKS
from klformer.memory import MEBIBYTE

SPEED_HINT = "of forward, backward and AdamW on random inputs of full length, without reading data"
RELATIVE_HINT = "seconds of softmax / seconds of this, of the same round; above 1 is faster"
PROCESSOR_HINT = "the same by processor time of all threads, which other work on the machine disturbs less"
MEMORY_HINT = "peak of a step above model, optimiser and inputs"
TIME_RATIO_HINT = "median of the ratios of the rounds that both took part in; above 1 klformer is faster"
KEPT_HINT = "the same in processes that keep the memory they free, which spares who writes out large tensors most"
ROUNDS_HINT = "rounds in which time was taken; fewer for those that take long"
MEMORY_RATIO_HINT = (
    "ratio of the medians of the peaks above the operands, lowest to highest of the pairs; above 1 klformer takes less"
)
EPSILON_NOTE = "Its epsilon is a constant that performer-pytorch adds to each feature; klformer adds none."
CROSSOVER_HINT = "length from which on it stays faster, on straight lines between measurements in logarithms"
GROWTH_HINT = "power of the length that fits best: 1 is linear, 2 quadratic"


def speed_table(name: str, rows: Sequence[ModelRow]) -> Table:
    """Speed and memory of the whole model of one task, with each attention."""
    columns = (
        Column("attention", numeric=False),
        Column("steps / s", "here", hint=SPEED_HINT),
        Column("relative to softmax", "here", hint=RELATIVE_HINT),
        Column("relative, processor", "here", hint=PROCESSOR_HINT),
        Column("MiB", "here", hint=MEMORY_HINT),
    )
    cells = tuple(_speed_row(row) for row in sorted(rows, key=lambda row: attention_order(row.attention)))
    title = f"{task_title(rows[0].task)}: training steps of the whole model"
    return Table(name, title, columns, cells, notes=(_describe_step(rows[0]),))


def _speed_row(row: ModelRow) -> tuple[Cell, ...]:
    attention = words(row.attention, code=True)
    if row.not_run:
        return (attention, Cell(f"not run: {row.not_run}", wrap=True), MISSING, MISSING, MISSING)
    relative = (_spread(each, "{:.2f}".format) for each in (row.relative, row.relative_processor))
    return (attention, _spread(row.speed, _three_digits), *relative, _mebibytes(row.memory))


def _describe_step(row: ModelRow) -> str:
    """Batch and length of a step here, and the paper's batch."""
    is_pair = row.task in TASKS and TASKS[row.task].is_pair
    one, many = ("pair of sequences", "pairs of sequences") if is_pair else ("sequence", "sequences")
    what = one if row.batch_size == 1 else many
    here, paper = (number(batch, "{:,.0f}").text for batch in (row.batch_size, row.paper_batch_size))
    reason = f"; {row.batch_note}" if row.batch_note else ""
    batch = f"{here} {what}, as in the paper," if here == paper else f"{here} {what} (in the paper {paper}{reason})"
    return f"A step has {batch} of {row.length:,} tokens."


def model_length_table(name: str, benchmark: ModelBenchmark) -> Table:
    """Memory of the whole model with every attention at every length, and why some were not run."""
    lengths = sorted({row.length for row in benchmark.length})
    by_place = {(row.attention, row.length): row for row in benchmark.length}
    reasons = list(dict.fromkeys(row.not_run for row in benchmark.length if row.not_run))
    title = "peak memory of a training step, MiB, by length in tokens"
    columns = [
        Column("attention", numeric=False),
        *(Column(f"{length:,}", "here", title) for length in lengths),
        Column("grows as", "here", hint=GROWTH_HINT),
    ]
    rows = []
    for attention in sorted({row.attention for row in benchmark.length}, key=attention_order):
        mine = [by_place.get((attention, length)) for length in lengths]
        cells = (_memory_at(row, reasons) for row in mine)
        rows.append((words(attention, code=True), *cells, _growth([row for row in mine if row is not None])))
    task = task_title(benchmark.length[0].task) if benchmark.length else ""
    notes = tuple(f"Not run ({position}): {reason}." for position, reason in enumerate(reasons, start=1))
    return Table(name, f"{task} model, one sequence", tuple(columns), tuple(rows), notes, stacked=True)


def _memory_at(row: ModelRow | None, reasons: Sequence[str]) -> Cell:
    if row is not None and row.not_run:
        return Cell("not run", note=f"({reasons.index(row.not_run) + 1})")
    return MISSING if row is None else _mebibytes(row.memory)


def _mebibytes(size: float | None) -> Cell:
    return number(None if size is None else size / MEBIBYTE, "{:,.0f}")


def _growth(rows: Sequence[ModelRow]) -> Cell:
    measured = [(row.length, row.memory) for row in rows if row.memory is not None]
    return _power(growth_power(*zip(*measured, strict=True))) if measured else MISSING


def _power(power: float | None) -> Cell:
    return MISSING if power is None else Cell(show_power(power), power)


def growth_table(name: str, benchmark: AttentionBenchmark) -> Table:
    """How every attention grows with the length, and from which length on it is faster than softmax."""
    columns = (
        Column("attention", numeric=False),
        Column("memory", "here", "grows as", hint=GROWTH_HINT),
        Column("time", "here", "grows as", hint=GROWTH_HINT),
        Column("faster than softmax", "here", hint=CROSSOVER_HINT),
    )
    rows = tuple(
        (words(row.name, code=True), _power(row.memory_slope), _power(row.time_slope), _crossover(row))
        for row in sorted(benchmark.summary, key=lambda row: attention_order(row.name))
    )
    return Table(name, "Growth with the length, and from where on faster than softmax", columns, rows)


def _crossover(row: AttentionSummary) -> Cell:
    if not row.faster_than_softmax:
        return MISSING
    return Cell(row.faster_than_softmax, 0.0 if row.faster_than_softmax == EVERYWHERE else row.crossover)


def attention_table(name: str, benchmark: AttentionBenchmark) -> Table:
    """Memory and time of every attention at every length."""
    lengths = sorted({row.length for row in benchmark.rows})
    by_place = {(row.name, row.length): row for row in benchmark.rows}
    kept = any(row.seconds_kept is not None for row in benchmark.rows)
    titles = ("memory above the operands, MiB", "time, ms", *(["time, freed memory kept, ms"] if kept else []))
    columns = [Column("attention", numeric=False)]
    columns += [Column(f"{length:,}", "here", title) for title in titles for length in lengths]
    rows = []
    for attention in sorted({row.name for row in benchmark.rows}, key=attention_order):
        mine = [by_place.get((attention, length)) for length in lengths]
        memory = [None if row is None or row.memory is None else row.memory / MEBIBYTE for row in mine]
        times = [_spread(None if row is None else row.seconds, "{:,.1f}".format, 1e3) for row in mine]
        if kept:
            times += [_spread(None if row is None else row.seconds_kept, "{:,.1f}".format, 1e3) for row in mine]
        rows.append((words(attention, code=True), *(number(value, "{:,.1f}") for value in memory), *times))
    title = "Forward and backward of one attention, by length in tokens"
    return Table(name, title, tuple(columns), tuple(rows), stacked=True)


def comparison_table(name: str, benchmark: PeerBenchmark) -> Table:
    """Time and memory of each peer relative to klformer's, and whether the results are the same."""
    ratios = "the peer's / klformer's"
    kept = any(row.time_kept is not None for row in benchmark.comparisons)
    columns = (
        Column("peer", numeric=False),
        Column("klformer", numeric=False),
        Column("tokens"),
        Column("time", "here", ratios, hint=TIME_RATIO_HINT),
        *([Column("time, freed memory kept", "here", ratios, hint=KEPT_HINT)] if kept else []),
        Column("rounds", "here", ratios, hint=ROUNDS_HINT),
        Column("memory", "here", ratios, hint=MEMORY_RATIO_HINT),
        Column("same results", numeric=False, hint="relative RMS difference, in single precision"),
    )
    rows = tuple(
        (
            words(row.peer),
            words(row.ours, code=True),
            number(row.length, "{:,}"),
            _spread(row.time, "{:.2f}".format),
            *([_spread(row.time_kept, "{:.2f}".format)] if kept else []),
            number(row.rounds, "{:,}"),
            _spread(row.memory, "{:.2f}".format),
            _same(row),
        )
        for row in benchmark.comparisons
    )
    with_epsilon = any(row.error_with_epsilon is not None for row in benchmark.comparisons)
    notes = (EPSILON_NOTE,) if with_epsilon else ()
    return Table(name, "Peers beside klformer: forward and backward", columns, rows, notes)


def _same(row: Comparison) -> Cell:
    if row.error is None:
        return words("not meant to be", note="different attentions")
    note = f"difference {_small(row.error)}"
    if row.error > TOLERANCE:
        return words("no", note=note)
    if row.error_with_epsilon is None:
        return words("yes", note=note)
    return words("without its epsilon", note=f"{note}, with it {_small(row.error_with_epsilon)}")


def _small(error: float) -> str:
    """A relative difference: in percent unless it is tiny."""
    return f"{100 * error:.2g}%" if error == 0 or error >= 1e-3 else f"{error:.0e}"


def subject_table(name: str, benchmark: PeerBenchmark) -> Table:
    """Time and memory of all that are compared."""
    columns = (
        Column("who", numeric=False),
        Column("tokens"),
        Column("ms", "here"),
        Column("rounds", "here", hint=ROUNDS_HINT),
        Column("MiB", "here", hint="peak above the operands"),
    )
    rows = tuple(
        (
            words(subject.name),
            number(subject.length, "{:,}"),
            _spread(subject.seconds, "{:,.1f}".format, 1e3),
            number(subject.rounds, "{:,}"),
            _spread(subject.memory, "{:,.1f}".format, 1 / MEBIBYTE),
        )
        for subject in benchmark.subjects
    )
    return Table(name, "Forward and backward of each", columns, rows)


def _spread(spread: Spread | None, form: Callable[[float], str], scale: float = 1) -> Cell:
    """The median, with the lowest and the highest as small print where they differ."""
    if spread is None:
        return MISSING
    note = ""
    if spread.low is not None and spread.high is not None and spread.low < spread.high:
        note = f"{form(spread.low * scale)} to {form(spread.high * scale)}"
    return Cell(form(spread.median * scale), spread.median * scale, note=note)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
