"""What else happens while training: small objects that the trainer tells about validations.

A callback's state is part of every checkpoint, so that a resumed run is the uninterrupted one; what it has to say in
the end is part of the result.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from klformer.errors import ArgumentError
from klformer.kernels import Kernel
from klformer.kernels.movement import Movement, kernel_movement
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
        """Act on an evaluation on the validation set."""

    def measure(self) -> Mapping[str, float]:
        """Return what the record of a validation is to say besides the metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what must survive an interruption, as JSON can say it."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave."""

    def result(self) -> dict[str, Any]:
        """Return what the result of the run is to say."""
        return {}


def milestone(percent: int) -> str:
    """Return the kind of checkpoint that is written when the validation accuracy first reaches so much."""
    return f"reached{percent}"


class Milestones(Callback):
    """Notes the step at which the selecting metric first reached 10, 20, ... 90%, for the paper's gradient table."""

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


class KernelMovement(Callback):
    """Notes the relative change of frequencies and kernels, from the weights that the model has now."""

    name: ClassVar[str] = "kernel_movement"

    def __init__(self, model: nn.Module) -> None:
        # Device and precision change with the model, which copies would not follow: they are made when measured.
        self._kernels = {name: module for name, module in model.named_modules() if isinstance(module, Kernel)}
        self._start = {
            name: {key: value.detach().cpu().clone() for key, value in kernel.state_dict().items()}
            for name, kernel in self._kernels.items()
            if kernel.spectrum is not None
        }

    def measure(self) -> Mapping[str, float]:
        """Return means over the layers, for the record of a validation; nothing for models without frequencies."""
        layers = self._layers()
        if not layers:
            return {}
        return {
            "kernel_frequencies_moved": sum(layer.frequencies for layer in layers) / len(layers),
            "kernel_moved": sum(layer.kernel for layer in layers) / len(layers),
        }

    def result(self) -> dict[str, Any]:
        by_layer = [{"frequencies": layer.frequencies, "kernel": layer.kernel} for layer in self._layers()]
        return {**self.measure(), "kernel_movement_by_layer": by_layer} if by_layer else {}

    def _layers(self) -> list[Movement]:
        found = []
        for name, state in self._start.items():
            start = copy.deepcopy(self._kernels[name])
            start.load_state_dict(state)
            movement = kernel_movement(start, self._kernels[name])
            assert movement is not None, "only kernels with frequencies are kept"
            found.append(movement)
        return found
