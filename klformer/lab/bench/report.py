"""What a benchmark hands out: its rows with the environment and the command, and tables of cells.

A benchmark has a function that makes cells of its rows: for every row of a table its cells by heading. The terminal
shows them, and so do the docs (research/evidence), from the rows that the benchmark wrote.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from klformer.files import write_json
from klformer.lab.environment import typed_command

Cells = dict[str, str]


def make_report(environment: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """What a benchmark found, with where it was measured and the command that was typed."""
    return {"environment": environment, "command": typed_command(), **content}


def write_report(
    path: Path | None, environment: Mapping[str, Any], content: Mapping[str, Any], console: Console
) -> None:
    """Write the report where it was asked for, and say so.

    Args:
        path: The file; None writes nothing.
        environment: What `describe_machine` said.
        content: With rows as "results", and what else belongs to them.

    Raises:
        FileError: it can't be written.
    """
    if path is not None:
        write_json(path, make_report(environment, content))
        console.print(f"figures written to {path}")


def without_empty(lines: Sequence[Cells]) -> list[Cells]:
    """The cells without those columns that are empty in every line."""
    headings = [heading for heading in (lines[0] if lines else ()) if any(line[heading] for line in lines)]
    return [{heading: line[heading] for heading in headings} for line in lines]


def as_table(
    lines: Sequence[Cells], *, title: str | None = None, caption: str | None = None, sections: str | None = None
) -> Table:
    """A table for the terminal; columns of numbers are aligned to the right.

    Args:
        sections: A heading: where its cell changes, a line is drawn.
    """
    table = Table(title=title, caption=caption, caption_justify="left")
    for heading in lines[0] if lines else ():
        numeric = all(line[heading][:1].isdigit() for line in lines if line[heading])
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=not numeric)
    for place, line in enumerate(lines):
        last = place + 1 == len(lines)
        ends = sections is not None and (last or lines[place + 1][sections] != line[sections])
        table.add_row(*line.values(), end_section=ends)
    return table
