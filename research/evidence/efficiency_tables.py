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

from benchmarks.few_queries import few_query_cells
from benchmarks.launches import launch_cells
from benchmarks.shares import share_cells
from klformer.errors import ArgumentError
from klformer.lab.analysis.cells import Row, markdown
from klformer.lab.bench.decode import decoding_cells
from klformer.lab.bench.model.output import speed_cells
from klformer.lab.bench.ops import operator_cells
from klformer.lab.bench.peers import peer_cells
from klformer.lab.bench.profile import padding_cells, profile_cells
from klformer.lab.bench.report import Cells, without_empty


def _as_benchmarks_print(cells: Callable[[Sequence[Row]], list[Cells]]) -> Callable[..., str]:
    """A kind of table that shows what a benchmark makes of its rows for the terminal; names of attentions are code."""

    def table(rows: Sequence[Row], show: Sequence[str] = ()) -> str:
        lines = without_empty(cells(rows))
        headings = list(lines[0])
        if strange := [heading for heading in show if heading not in headings]:
            raise ArgumentError(f"show= must be some of {', '.join(headings)}; got {', '.join(strange)}")
        chosen = show or headings
        return markdown(chosen, [[_code(heading, line[heading]) for heading in chosen] for line in lines])

    return table


def _code(heading: str, cell: str) -> str:
    return f"`{cell}`" if heading == "attention" else cell


EFFICIENCY: Mapping[str, Callable[..., str]] = {
    "operators": _as_benchmarks_print(operator_cells),
    "few-queries": _as_benchmarks_print(few_query_cells),
    "launches": _as_benchmarks_print(launch_cells),
    "shares": _as_benchmarks_print(share_cells),
    "decoding": _as_benchmarks_print(decoding_cells),
    "peers": _as_benchmarks_print(peer_cells),
    "models": _as_benchmarks_print(speed_cells),
    "profile": _as_benchmarks_print(profile_cells),
    "padding": _as_benchmarks_print(padding_cells),
}
