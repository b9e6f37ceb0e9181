"""What analyses share: counts with one default for the full analysis and a smaller one for --quick, some of the
examples, and a check."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.lab.data import Examples
from klformer.lab.runs.load import LoadedRun
from klformer.lab.training.objectives import Classification

Full = TypeVar("Full", int, None)


@dataclass(frozen=True)
class Count(Generic[Full]):
    """A count that is an option of an analysis.

    Args:
        full: What it is if it is not given; None for no limit.
        quick: What it is then with --quick.
        minimum: The smallest that makes sense.
    """

    name: str
    full: Full
    quick: int
    minimum: int = 1

    def check(self, given: int | None) -> None:
        """Raises TypeError or ValueError unless it is a count that makes sense, or not given."""
        if given is not None:
            check_count(self.name, given, self.minimum)

    def choose(self, given: int | None, *, quick: bool) -> int | Full:
        """What was given, or else the default."""
        if given is not None:
            return given
        return self.quick if quick else self.full


def some_of(examples: Examples, limit: int | None) -> Examples:
    """So many of the examples at random, the same for all runs; all if there is no limit.

    Not the first ones: data may be sorted by class, as IMDB is.
    """
    if limit is None or limit >= len(examples):
        return examples
    return examples.take(np.sort(np.random.default_rng(0).permutation(len(examples))[:limit]))


def check_classification(loaded: LoadedRun, analysis: str) -> None:
    """Raises ArgumentError unless the run has classes, of which the analysis speaks."""
    if not isinstance(loaded.task.objective(), Classification):
        raise ArgumentError(
            f"{loaded.folder}: {analysis} is defined for classes, the task {loaded.config.task} has none"
        )
