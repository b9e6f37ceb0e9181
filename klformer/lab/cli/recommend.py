"""`klformer recommend`: which attention to use, and the numbers behind the answer."""

from dataclasses import dataclass

from klformer.checks import check_count, check_number
from klformer.lab.analysis.output import print_table
from klformer.lab.analysis.recommend import Needs, recommend
from klformer.lab.cli.command import plain_command
from klformer.lab.terminal import make_console

#: Rows of the table, the answer first.
MOST_ROWS = 5


@dataclass(frozen=True)
class Recommend:
    """Say which attention to use for sequences of a length, from what was measured.

    The measurements are of the task `recall`, three seeds each. Examples:

      klformer recommend --length 512
      klformer recommend --length 16384 --deterministic
      klformer recommend --length 4096 --budget 0.25
    """

    length: int = 4096
    """Tokens of a sequence."""
    budget: float = 1.0
    """Work that may be spent on attention, as a part of what softmax takes at this length."""
    deterministic: bool = False
    """The same input must always give the same output: no frequencies that are redrawn."""
    head_dim: int = 64
    """Size of queries, keys and values of a head."""


def recommend_attention(options: Recommend) -> None:
    """Print the answer, the reasons, and the table of what it was chosen from."""
    check_count("length", options.length)
    check_count("head_dim", options.head_dim)
    check_number("budget", options.budget, exclusive=True)
    needs = Needs(options.length, options.budget, options.deterministic, options.head_dim)
    answer = recommend(needs)
    console = make_console(100)
    console.print(f"{answer.attention}\n", highlight=False)
    for sentence in answer.reasons:
        console.print(f"- {sentence}", highlight=False)
    rows = [{"": "->" if row["attention"] == answer.attention else "", **row} for row in answer.candidates]
    console.print()
    print_table(console, rows[:MOST_ROWS], answer.title)
    if len(rows) > MOST_ROWS:
        console.print(f"and {len(rows) - MOST_ROWS} more that fit", highlight=False)


COMMAND = plain_command(Recommend, recommend_attention)
