"""What training works for: the loss of a batch, and the metrics of a split.

The trainer and the evaluation know objectives and nothing of labels. A new one is one file with a subclass of
`Objective`. It says how outputs are made from a batch, what their loss is, what is kept of them as predictions, and
which metrics follow from all predictions of a split. Metrics are computed from gathered predictions and not as means
over batches, so that F1 or a correlation is one too.

A loss is a sum and the count of what it sums over: examples here, masked tokens where there are targets for tokens.
Where an objective draws something itself, such as a mask, it does so in `pose`, as a function of what it is given there
and of nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from klformer.data import Batch
from klformer.data.sequences import AnyArray
from klformer.training.metrics import Metric


def model_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """What a model gives for a batch, of single sequences or pairs."""
    if batch.second is None:
        return model(batch.inputs, batch.key_mask)
    return model(batch.inputs, batch.second, batch.key_mask, batch.second_mask)


class Objective(ABC):
    """A loss with its metrics: what a task's `objective()` returns.

    A new one subclasses this; `klformer/training/objectives/` has those that are there.

    Examples:
        >>> import torch
        >>> from klformer.training.objectives import Regression
        >>> objective = Regression()
        >>> objective.selecting.name, objective.num_outputs
        ('mse', 1)
        >>> objective.measure(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))["mse"]
        2.0
    """

    #: All metrics; the first is the one that selects the best model.
    metrics: ClassVar[Sequence[Metric]]
    #: What is kept of an example for the metrics.
    prediction_dtype: ClassVar[torch.dtype] = torch.float32
    #: What metrics of the draws' combined prediction are called: NAME becomes voting_NAME.
    combination: ClassVar[str] = "combined"
    #: Whether targets and outputs are of the positions of a sequence, and not of the whole.
    of_positions: ClassVar[bool] = False

    @property
    def selecting(self) -> Metric:
        """The metric that selects the best model, and that a run is named by."""
        return self.metrics[0]

    @property
    def prediction_shape(self) -> tuple[int, ...]:
        """The shape of what is kept of an example."""
        return ()

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Numbers that the model's head gives for an example, or for a position of it."""

    @abstractmethod
    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The loss, summed over what `count` counts: outputs (B, ...) -> (); of several draws (n, B, ...) -> (n,)."""

    @abstractmethod
    def predict(self, outputs: Tensor, batch: Batch) -> Tensor:
        """What is kept of outputs (n, B, ...) for the metrics: (n, B, *prediction_shape)."""

    @abstractmethod
    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """All metrics by name, from all predictions (N, ...) of a split and their targets (N, ...)."""

    @abstractmethod
    def combine(self, predictions: Tensor) -> Tensor:
        """One prediction (N, ...) from those of all draws, (n, N, ...)."""

    @abstractmethod
    def check_targets(self, targets: Tensor) -> None:
        """Refuse targets (N, ...) that are not of this objective.

        Raises:
            ArgumentError: they have the wrong type or values.
        """

    @abstractmethod
    def random_targets(self, generator: np.random.Generator, count: int) -> AnyArray:
        """Targets (count, ...) of the right kind that mean nothing: for benchmarks."""

    def answers(self, outputs: Tensor) -> Tensor:
        """What outputs (..., num_outputs) mean to people, for the mean and the deviation over draws: probabilities of
        classes, or numbers in the targets' own units."""
        return outputs

    @property
    def has_details(self) -> bool:
        """Whether `details` has something to say."""
        return False

    def details(self, answers: Tensor, targets: Tensor) -> dict[str, Any]:
        """More on a split for its result, as JSON, from the mean answers (N, num_outputs) of all draws."""
        return {}

    def pose(self, batch: Batch, draw: Sequence[int]) -> Batch:
        """What the model is asked about a batch: the batch as it is, or something hidden in it.

        Args:
            draw: Numbers that anything random is a function of, together with `batch.ids`: seed and step in training,
                nothing in evaluation.
        """
        return batch

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the model gives for a batch, (B, ...)."""
        return model_outputs(model, batch)

    def count(self, outputs: Tensor, batch: Batch) -> int:
        """How many terms `loss_of` sums in each draw: examples, if nothing else is said."""
        return len(batch)

    def sums(self, outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Of the metrics that are means over what `count` counts, the sums in a batch: shown while training."""
        return {}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The sum of a batch's loss and the count of what it sums over."""
        batch = self.pose(batch, ())
        outputs = self.outputs(model, batch)
        return self.loss_of(outputs, batch), self.count(outputs, batch)

    def metric(self, name: str) -> Metric:
        """The metric of that name."""
        return next(metric for metric in self.metrics if metric.name == name)
