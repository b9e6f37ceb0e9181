"""Tables of the docs that are those which a command prints, made of the rows that it wrote.

attention        time of attentions against the length (`klformer bench attention`); show= seconds, processor,
                 seconds_kept or memory, and without= some of the columns
mse-formulas     how far the formulas of Theorem 3 are from the simulation (`analyze mse`)
mse-claims       what the paper says of the errors, counted
mse-eigenvalues  the error against the eigenvalues of the covariance
lemma            how far the maps of Lemma S.2 are from the kernel
turing           machines and constructions (`analyze turing`)
turing-scaling   one machine, stopped after ever more steps
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from klformer.lab.analysis.cells import Row
from klformer.lab.bench.attention import length_table
from klformer.lab.tables import Table
from research.mse.command import check_claims, compare_formulas, compare_maps, fall_with_eigenvalues
from research.turing.command import brief, brief_scaling


def attention(rows: Sequence[Row], show: Sequence[str] = ("seconds",), without: Sequence[str] = ()) -> str:
    """Return milliseconds or MiB of every attention by length, how they grow, and beside softmax.

    Args:
        show: The one quantity to show.
        without: Headings of columns to leave out.
    """
    (quantity,) = show
    table = length_table(rows, quantity)
    return table.with_columns([column.title for column in table.columns if column.title not in without]).as_markdown()


def _as_printed(summary: Callable[[list[dict[str, Any]]], Sequence[Row]]) -> Callable[[Sequence[Row]], str]:
    """Return a kind of table that shows what a command makes of its rows for the terminal."""
    return lambda rows: Table.of(summary([dict(row) for row in rows])).as_markdown()


MEASUREMENTS: Mapping[str, Callable[..., str]] = {
    "attention": attention,
    "mse-formulas": _as_printed(compare_formulas),
    "mse-claims": _as_printed(check_claims),
    "mse-eigenvalues": _as_printed(fall_with_eigenvalues),
    "lemma": _as_printed(compare_maps),
    "turing": _as_printed(lambda rows: [brief(row) for row in rows]),
    "turing-scaling": _as_printed(lambda rows: [brief_scaling(_without_setting(row)) for row in rows]),
}


def _without_setting(row: Row) -> Row:
    return {field: value for field, value in row.items() if field != "setting"}
