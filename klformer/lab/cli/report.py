"""`klformer report`: runs, analyses and benchmarks as one page."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from klformer.errors import ArgumentError, RunError
from klformer.lab.cli.command import plain_command
from klformer.lab.report.collect import collect
from klformer.lab.report.page import write_report


@dataclass(frozen=True)
class Report:
    """Write runs, analyses and benchmarks as one page for a browser, beside the paper's figures.

    The page needs no network and no other file. Results that are not there are shown as missing. Examples:

      klformer report runs
      klformer report runs/text-* --analysis analysis --bench bench --out text.html
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Runs, or folders of runs; analyses and benchmarks in them are found, too."""
    out: Path = Path("report.html")
    """Page to write; its figures go to a folder beside it as SVG files."""
    title: str = "klformer: results"
    """Title of the page."""
    analysis: Path | None = None
    """Folder with variance.json or eigenvalues.json, as `klformer analyze` writes them."""
    bench: Path | None = None
    """Folder with attention.json, model.json or peers.json, as `klformer bench` writes them, or one of these files."""


def report_runs(options: Report) -> None:
    """Read, draw, write, and say what became of it."""
    if not options.runs and options.analysis is None and options.bench is None:
        raise ArgumentError("give runs, or folders of runs: klformer report runs")
    collection = collect(options.runs, analysis=options.analysis, bench=options.bench)
    page, *figures = write_report(collection, options.out, title=options.title)
    finished = sum(run.result is not None for run in collection.runs)
    print(f"runs: {finished} finished, {len(collection.runs) - finished} unfinished")
    for folder in collection.left_out:
        print(f"note: {folder} holds no run; left out")
    print(f"written to {page}" + (f", {len(figures)} figures to {figures[0].parent}" if figures else ""))
    if collection.damaged:
        problems = "; ".join(damaged.problem for damaged in collection.damaged)
        raise RunError(f"{page} is written, and lists what is damaged: {problems}")


COMMAND = plain_command(Report, report_runs)
