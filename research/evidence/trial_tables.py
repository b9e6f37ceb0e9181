"""Tables of the docs on trials that decided something and on the demonstration, of the rows that commands wrote.

fastfood-blocks  FastFood's two ways to project a token, in time (`bench fastfood`)
denominators     how often a denominator is negative, by smoothing (`bench denominators`)
sequence-steps   time and memory of steps with sequences in parts (`klformer bench sequence`)
traffic          what the processes of such steps say to one another, counted and predicted
processes        such steps on several processes beside one
demo             what is kept of a model whose attention is replaced (`klformer demo`)
"""

from collections.abc import Callable, Mapping, Sequence

from benchmarks import denominators, fastfood
from klformer.lab.analysis.cells import Row, markdown
from klformer.lab.bench.sequence_tables import beside_one_process, step_cells, traffic
from klformer.lab.runs import demo


def _as_printed(lines_of: Callable[[Sequence[Row]], Sequence[Mapping[str, str]]]) -> Callable[[Sequence[Row]], str]:
    """A kind of table with the cells that a command prints."""

    def table(rows: Sequence[Row]) -> str:
        lines = [_with_code(line) for line in lines_of(rows)]
        return markdown(list(lines[0]), [list(line.values()) for line in lines])

    return table


def _with_code(line: Mapping[str, str]) -> dict[str, str]:
    """Names of attentions as code."""
    return {heading: f"`{cell}`" if heading == "attention" else cell for heading, cell in line.items()}


TRIALS: Mapping[str, Callable[..., str]] = {
    "fastfood-blocks": _as_printed(lambda rows: [fastfood.cells(row) for row in rows]),
    "denominators": _as_printed(denominators.shares),
    "sequence-steps": _as_printed(lambda rows: [step_cells(row) for row in rows]),
    "traffic": _as_printed(traffic),
    "processes": _as_printed(beside_one_process),
    "demo": _as_printed(lambda rows: [demo.cells(row) for row in rows]),
}
