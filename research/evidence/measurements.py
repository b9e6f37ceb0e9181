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

from klformer.lab.analysis.cells import Row, markdown
from klformer.lab.analysis.output import cell
from klformer.lab.bench.attention_tables import memory_columns, names_of, time_columns
from research.mse.command import check_claims, compare_formulas, compare_maps, fall_with_eigenvalues
from research.turing.command import brief, brief_scaling


def attention(rows: Sequence[Row], show: Sequence[str] = ("seconds",), without: Sequence[str] = ()) -> str:
    """Milliseconds or MiB of every attention by length, how they grow, and beside softmax.

    Args:
        show: The one quantity to show.
        without: Headings of columns to leave out.
    """
    (quantity,) = show
    columns = memory_columns(rows) if quantity == "memory" else time_columns(rows, quantity)
    kept = {heading: cells for heading, cells in columns.items() if heading not in without}
    names = [f"`{name}`" for name in names_of(rows)]
    return markdown(["attention", *kept], list(zip(names, *kept.values(), strict=True)))


def _as_printed(summary: Callable[[list[dict[str, Any]]], Sequence[Row]]) -> Callable[[Sequence[Row]], str]:
    """A kind of table that shows what a command makes of its rows for the terminal."""

    def table(rows: Sequence[Row]) -> str:
        made = summary([dict(row) for row in rows])
        return markdown(list(made[0]), [[cell(value) for value in row.values()] for row in made])

    return table


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
