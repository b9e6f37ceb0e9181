"""Tables of speed and memory, made of the rows that benchmarks wrote, with the cells that they print.

operators    time and memory of the product (`klformer bench ops`)
few-queries  the product of a few queries, by pairs and through a state (`bench few-queries`)
launches     launches of the product on a GPU (`bench launches`)
shares       where time goes (`bench operator-shares`, `bench layer-shares`)
decoding     tokens a second (`klformer bench decode`)
peers        klformer beside what one would pick instead (`klformer bench peers`)
models       training steps of whole models (`klformer bench model`)
profile      one training step of a model (`klformer profile`)
padding      batches padded to their own longest sequence and to that of all (`klformer profile --padding`)

Each takes show=, the headings of its columns that the page wants; all that are not empty by default.
"""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.few_queries import few_query_table
from benchmarks.launches import launch_table
from benchmarks.shares import share_table
from klformer.lab.analysis.cells import Row
from klformer.lab.bench.decode import decoding_table
from klformer.lab.bench.model.output import speed_table
from klformer.lab.bench.ops import operator_table
from klformer.lab.bench.peers import peer_table
from klformer.lab.tables import Table, Tabulate, number, percent, words
from klformer.memory import MEBIBYTE


def _as_benchmarks_print(tabulate: Tabulate) -> Callable[..., str]:
    """Return a kind of table that a benchmark prints on the terminal, or some columns of it."""

    def table(rows: Sequence[Row], show: Sequence[str] = ()) -> str:
        made = tabulate(rows)
        return (made.with_columns(show) if show else made).as_markdown()

    return table


def _profiles(rows: Sequence[Row]) -> Table:
    several = len({row.get("task") for row in rows}) > 1
    lines = [
        ({"task": words(row["task"])} if several else {})
        | {
            "attention": words(row["attention"], code=True),
            "a step": number(row["seconds"], "{:.2f} s"),
            "of it in the attention product": percent(row["attention_seconds"] / row["seconds"], "{:.0f}%"),
            "MiB above the model": number(row["peak_bytes"] / MEBIBYTE, "{:,.0f}"),
        }
        for row in rows
    ]
    return Table.of(lines)


def _padding(rows: Sequence[Row]) -> Table:
    lines = [
        {
            "attention": words(row["attention"], code=True),
            "batches": row["num_batches"],
            "tokens": number(row["tokens_ratio"], "{:.2f}x"),
            "time": number(row["time_ratio"], "{:.2f}x"),
            "time, median of the batches": number(row["median_time_ratio"], "{:.2f}x"),
            "losses differ by": number(row["largest_difference"], "{:.1g}"),
        }
        for row in rows
    ]
    return Table.of(lines)


EFFICIENCY: Mapping[str, Callable[..., str]] = {
    "operators": _as_benchmarks_print(operator_table),
    "few-queries": _as_benchmarks_print(few_query_table),
    "launches": _as_benchmarks_print(launch_table),
    "shares": _as_benchmarks_print(share_table),
    "decoding": _as_benchmarks_print(decoding_table),
    "peers": _as_benchmarks_print(peer_table),
    "models": _as_benchmarks_print(speed_table),
    "profile": _as_benchmarks_print(_profiles),
    "padding": _as_benchmarks_print(_padding),
}
