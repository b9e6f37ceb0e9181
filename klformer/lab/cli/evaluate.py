"""`klformer eval`: a run, evaluated again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from klformer.errors import ArgumentError
from klformer.lab.cli.command import plain_command
from klformer.lab.runs.load import load_run
from klformer.lab.runs.naming import attention_label, describe_score
from klformer.lab.tables import Column, Table, as_cell, percent, words
from klformer.lab.terminal import make_console
from klformer.lab.training.metrics import largest_share
from klformer.lab.training.processes import is_main_process
from klformer.lab.training.progress import make_reporter


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the best checkpoint of a run, or say which if that is damaged, averaged over draws of its frequencies.

    Example: klformer eval runs/sparsity0.5-laptop-gmm-rks-seed0 --draws 100
    """

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    split: Literal["train", "validation", "test"] = "test"
    """What to evaluate on."""
    draws: int = 10
    """Draws of the frequencies: mean, deviation and majority vote."""
    data_root: Path | None = None
    """Where the data is, if not where the run had it."""


def evaluate_run(options: Evaluate) -> None:
    """Load, evaluate, and say what came out."""
    if options.draws < 1:
        raise ArgumentError(f"draws must be at least 1, got {options.draws}")
    reporter = make_reporter(quiet=not is_main_process())
    loaded = load_run(options.run, reporter, data_root=options.data_root)
    reporter.say(f"{loaded.config.task} with {attention_label(loaded.config)}, {loaded.weights}")
    result = loaded.evaluate(options.split, draws=options.draws)
    reporter.say(
        f"{options.split}: {result.num_examples:,} examples, {describe_score(loaded.metric, result.as_dict())}"
    )
    others = [metric for metric in loaded.task.objective().metrics if metric != loaded.metric]
    if others:
        reporter.say(", ".join(f"{metric.name} {metric.show(result.mean(metric.name))}" for metric in others))
    if result.details and is_main_process():
        _print_classes(loaded.task.class_names(), result.details)


def _print_classes(names: Sequence[str] | None, details: Mapping[str, Any]) -> None:
    """Print the table of confusions with the F1 of every class, and the numbers that sum it up."""
    confusion = details["confusion"]
    titles = names or [str(number) for number in range(len(confusion))]
    columns = (Column("class \\ taken for", numeric=False), *map(Column, titles), Column("F1"))
    rows = tuple(
        (words(title), *map(as_cell, row), percent(f1, "{:.1f}%"))
        for title, row, f1 in zip(titles, confusion, details["f1_by_class"], strict=True)
    )
    console = make_console(20 + 12 * len(titles))
    Table("", columns, rows).print(console)
    console.print("Counted by the mean probability of all draws.", highlight=False)
    console.print(
        f"macro F1 {100 * details['macro_f1']:.2f}%, expected calibration error "
        f"{100 * details['calibration_error']:.2f}%",
        highlight=False,
    )
    console.print(f"the most frequent class alone gives {100 * largest_share(details):.2f}%", highlight=False)


COMMAND = plain_command(Evaluate, evaluate_run)
