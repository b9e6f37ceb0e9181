"""Where an analysis goes: numbers as JSON and CSV, a figure as SVG and PNG, all with one caption."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from klformer.files import replacing, write_json
from klformer.lab.environment import describe_environment, typed_command
from klformer.lab.plotting import save
from klformer.lab.tables import Table


def write_results(
    folder: Path,
    name: str,
    *,
    caption: str,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    figure: Figure | None = None,
) -> list[Path]:
    """Write name.json, name.csv and, with a figure, name.svg and name.png.

    Args:
        caption: One or two sentences that say what the rows and the figure show; under the figure as well.
        rows: The numbers, one flat mapping a row, all with the same keys.
        settings: What the numbers depend on: runs, draws, seeds.

    In the JSON a number that is not finite is null, because JSON has no other word for it.

    Returns:
        What was written.
    """
    report = {
        "caption": caption,
        "environment": describe_environment(),
        "command": typed_command(),
        "settings": settings,
        "rows": rows,
    }
    written = [folder / f"{name}.json", folder / f"{name}.csv"]
    write_json(written[0], report)
    write_csv(written[1], rows)
    if figure is not None:
        figure.supxlabel(caption, fontsize=8, wrap=True)
        written += [folder / f"{name}.svg", folder / f"{name}.png"]
        save(figure, *written[2:])
    return written


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows, all with the same keys, under one header. Raises as `replacing`."""
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def print_table(console: Console, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the rows; their keys are the headings."""
    Table.of([{str(key).replace("_", " "): value for key, value in row.items()} for row in rows], title).print(console)
