"""What else happens while training: small objects that the trainer tells about validations.

A callback's state is part of every checkpoint, so that a resumed run is the uninterrupted one; what it has to say in
the end is part of the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from klformer.errors import ArgumentError
from klformer.lab.training.evaluation import Evaluation
from klformer.lab.training.metrics import Metric

#: Validation accuracies, in percent, at which the paper looks at gradients.
MILESTONES = (20, 40, 60, 80)


@dataclass(frozen=True)
class Validation:
    """What a callback is told after a validation.

    Args:
        step: The steps that are done.
        evaluation: What was found.
        keep: Write the weights as a checkpoint of a kind, of this step, with facts about it; one process does.
    """

    step: int
    evaluation: Evaluation
    keep: Callable[[str, int, Mapping[str, Any]], None]


class Callback:
    """Told what happens while training; does nothing by itself."""

    #: Under which its state is saved.
    name: ClassVar[str]

    #: Kinds of checkpoints that it keeps.
    checkpoint_kinds: Sequence[str] = ()

    def after_validation(self, validation: Validation) -> None:
        """The model was evaluated on the validation set."""

    def measure(self) -> Mapping[str, float]:
        """What the record of a validation is to say besides the metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """What must survive an interruption, as JSON can say it."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave."""

    def result(self) -> dict[str, Any]:
        """What the result of the run is to say."""
        return {}


def milestone(percent: int) -> str:
    """The kind of checkpoint that is written when the validation accuracy first reaches so much."""
    return f"reached{percent}"


class Milestones(Callback):
    """Notes the step at which the selecting metric first reached 10, 20, ... 90%, for the paper's gradient table.

    Args:
        metric: A share of which more is better.
        keep_weights: Keep the weights of the moments that the paper looks at.
    """

    name: ClassVar[str] = "milestones"

    def __init__(self, metric: Metric, *, keep_weights: bool) -> None:
        if not (metric.percent and metric.higher_is_better):
            raise ArgumentError(f"milestones are of a share of which more is better, which {metric.name} is not")
        self.metric = metric
        self.keep_weights = keep_weights
        self.checkpoint_kinds = tuple(map(milestone, MILESTONES))
        self.first_reached: dict[str, int] = {}

    def after_validation(self, validation: Validation) -> None:
        value = validation.evaluation.mean(self.metric.name)
        for percent in range(10, 100, 10):
            if value >= percent / 100 and str(percent) not in self.first_reached:
                self.first_reached[str(percent)] = validation.step
                if self.keep_weights and percent in MILESTONES:
                    validation.keep(milestone(percent), validation.step, {f"validation_{self.metric.name}": value})

    def state(self) -> dict[str, Any]:
        return {"first_reached": self.first_reached}

    def load(self, state: Mapping[str, Any]) -> None:
        self.first_reached = dict(state["first_reached"])

    def result(self) -> dict[str, Any]:
        return {"first_reached": self.first_reached}
