"""`klformer curves`: learning curves of runs as a figure."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from klformer.lab.cli.command import plain_command
from klformer.lab.report.curves import draw_curves


@dataclass(frozen=True)
class Curves:
    """Draw the metric of runs on the validation set against steps.

    Example: klformer curves runs/sparsity0.5-* --out curves.svg
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Runs, or folders of runs."""
    out: Path = Path("curves.svg")
    """File to write: svg, png or pdf."""
    title: str | None = None
    """Title of the figure."""


def run(options: Curves) -> None:
    """Draw, and say where the figure is."""
    draw_curves(options.runs, options.out, title=options.title)
    print(f"written to {options.out}")


COMMAND = plain_command(Curves, run)
