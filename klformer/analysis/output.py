"""Where an analysis goes: numbers as JSON and CSV, a figure as SVG and PNG, all with one caption."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from klformer.plotting import save


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
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "caption": caption,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "settings": settings,
        "rows": rows,
    }
    written = [folder / f"{name}.json", folder / f"{name}.csv"]
    written[0].write_text(json.dumps(_plain(report), indent=2, allow_nan=False) + "\n")
    write_csv(written[1], rows)
    if figure is not None:
        figure.supxlabel(caption, fontsize=8, wrap=True)
        written += [folder / f"{name}.svg", folder / f"{name}.png"]
        save(figure, *written[2:])
    return written


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows, all with the same keys, under one header."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _plain(value: Any) -> Any:
    """What JSON can say of a value."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def print_table(console: Console, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """The rows on screen; numbers with four significant digits, - where there is none."""
    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        heading = str(column).replace("_", " ")  # so that it can be broken
        table.add_column(heading, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
