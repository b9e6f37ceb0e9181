"""`klformer eval`: a run, evaluated again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from klformer.cli.command import plain_command
from klformer.errors import ArgumentError
from klformer.runs.load import load_run
from klformer.runs.naming import attention_label, describe_score
from klformer.training.processes import is_main_process
from klformer.training.progress import make_reporter


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


def run(options: Evaluate) -> None:
    """Load, evaluate, and say what came out.

    Raises:
        ArgumentError: there would be no draw.
        RunError: the folder is not a run's.
    """
    if options.draws < 1:
        raise ArgumentError(f"draws must be at least 1, got {options.draws}")
    reporter = make_reporter(quiet=not is_main_process())
    loaded = load_run(options.run, reporter, data_root=options.data_root)
    reporter.say(f"{loaded.config.task} with {attention_label(loaded.config)}, {loaded.weights}")
    result = loaded.evaluate(options.split, draws=options.draws)
    reporter.say(
        f"{options.split}: {result.num_examples:,} examples, {describe_score(loaded.metric, result.as_dict())}"
    )


COMMAND = plain_command(Evaluate, run)
