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

import torch
from torch import Tensor, nn

from klformer.checks import check_choice
from klformer.errors import ArgumentError
from klformer.lab.data import Batch
from klformer.lab.training.metrics import Metric


class Objective(ABC):
    """A loss with its metrics: what a task's `objective()` returns.

    A new one subclasses this; `klformer/lab/training/objectives/` has those that are there.

    Examples:
        >>> import numpy as np, torch
        >>> from klformer.lab.training.objectives import Regression
        >>> objective = Regression()
        >>> objective.selecting.name, objective.num_outputs
        ('mse', 1)
        >>> objective.measure(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))["mse"]
        2.0

        What training does with a batch, for a model that says 1 and 2 where 1 and 4 are right:

        >>> from klformer.lab.data import Examples, Sequences, collate
        >>> examples = Examples(Sequences.from_matrix(np.ones((2, 3), np.int64)), np.array([1.0, 4.0]))
        >>> objective.check_targets(torch.from_numpy(examples.targets))
        >>> batch = objective.pose(collate(examples, np.arange(2)), draw=(0, 1))
        >>> model = lambda inputs, key_mask: torch.tensor([[1.0], [2.0]])
        >>> outputs = objective.outputs(model, batch)
        >>> objective.loss_of(outputs, batch), objective.count(outputs, batch)
        (tensor(4.), 2)
        >>> objective.loss(model, batch)
        (tensor(4.), 2)
        >>> objective.sums(outputs, batch)["mae"]
        tensor(2.)

        And what evaluation does, with two draws of the frequencies:

        >>> predictions = objective.predict(torch.stack([outputs, 3 * outputs]), batch)
        >>> objective.combine(predictions)
        tensor([2., 4.])
        >>> objective.answers(outputs).shape, objective.details(outputs, batch.targets)
        (torch.Size([2, 1]), {})
        >>> objective.metric("r2").higher_is_better
        True
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
        """Return the loss, summed over what `count` counts.

        Args:
            outputs: Of a model, (B, num_outputs), or (B, L, num_outputs) if `of_positions`; of n draws (n, B, ...).
            batch: What the outputs are for.

        Returns:
            (), differentiable; of n draws (n,).
        """

    @abstractmethod
    def predict(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return what is kept of outputs for the metrics.

        Args:
            outputs: Of n draws, (n, B, ...).
            batch: What they are for.

        Returns:
            (n, B, *prediction_shape).
        """

    def predict_part(self, outputs: Tensor, batch: Batch, start: int) -> Tensor:
        """Predict as `predict`, for one part of the sequences: the sum over the parts is what `predict` gives of the
        whole.

        For objectives with outputs of positions.

        Args:
            outputs: Of the positions of the part, (n, B, length, num_outputs).
            batch: The part.
            start: The position at which it begins.

        Returns:
            (n, B, *prediction_shape).

        Raises:
            ArgumentError: the objective has none.

        Examples:
            >>> import torch
            >>> from klformer.lab.training.objectives import PositionClassification
            >>> objective = PositionClassification(num_classes=2, max_len=4)
            >>> outputs = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
            >>> objective.predict_part(outputs, None, start=1)
            tensor([[[0, 1, 1, 0]]])
        """
        raise ArgumentError(f"{type(self).__name__} has no predict_part: parallel.sequence must be 1 for it")

    @abstractmethod
    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Compute all metrics by name.

        Args:
            predictions: All of a split, (N, *prediction_shape).
            targets: (N,), or (N, length) if `of_positions`.

        Returns:
            A number for each of `metrics`.

        Raises:
            ArgumentError: nothing was predicted.
        """

    @abstractmethod
    def combine(self, predictions: Tensor) -> Tensor:
        """Make one prediction from those of all draws.

        Args:
            predictions: (n, N, *prediction_shape).

        Returns:
            (N, *prediction_shape).
        """

    @abstractmethod
    def check_targets(self, targets: Tensor) -> None:
        """Refuse targets that are not of this objective.

        Args:
            targets: (N,), or (N, length) if `of_positions`.

        Raises:
            ArgumentError: they have the wrong type or values.
        """

    def answers(self, outputs: Tensor) -> Tensor:
        """Return what outputs mean to people: probabilities of classes, or numbers in the targets' own units.

        Predictions have the mean and the deviation of them over draws.

        Args:
            outputs: (..., num_outputs).

        Returns:
            (..., num_outputs).
        """
        return outputs

    @property
    def has_details(self) -> bool:
        """Whether `details` has something to say."""
        return False

    def details(self, answers: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return more on a split for its result, as JSON.

        Args:
            answers: The mean of all draws, (N, num_outputs).
            targets: (N,).

        Returns:
            What the result is to have besides the metrics; nothing, if nothing else is said.
        """
        return {}

    def pose(self, batch: Batch, draw: Sequence[int]) -> Batch:
        """Return what the model is asked about a batch: the batch as it is, or something hidden in it.

        Args:
            batch: As the data has it.
            draw: Numbers that anything random is a function of, together with `batch.ids`: seed and step in training,
                nothing in evaluation.
        """
        return batch

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return what the model gives for a batch.

        Args:
            model: Called with the inputs and their mask; for pairs with both inputs, then both masks.
            batch: After `pose`: inputs (B, L) or (B, L, width), masks (B, L).

        Returns:
            (B, num_outputs), or (B, L, num_outputs) if `of_positions`.
        """
        return model(*batch.arguments())

    def count(self, outputs: Tensor, batch: Batch) -> int:
        """Count the terms that `loss_of` sums in each draw: examples, if nothing else is said.

        Args:
            outputs: As in `loss_of`.
            batch: What they are for.
        """
        return len(batch)

    def sums(self, outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums in a batch of those metrics that are means over what `count` counts: shown while training.

        Args:
            outputs: (B, ...), as in `loss_of`.
            batch: What they are for.

        Returns:
            Sums () by the name of the metric; none, if nothing else is said.
        """
        return {}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Compute the loss of a model for a batch, without draws: `pose`, `outputs` and `loss_of`.

        Args:
            model: As in `outputs`.
            batch: As the data has it.

        Returns:
            The sum of the loss, (), and the count of what it sums over.
        """
        batch = self.pose(batch, ())
        outputs = self.outputs(model, batch)
        return self.loss_of(outputs, batch), self.count(outputs, batch)

    def metric(self, name: str) -> Metric:
        """Return the metric of a name.

        Args:
            name: Of one of `metrics`.

        Raises:
            ArgumentError: there is no such metric.
        """
        by_name = {metric.name: metric for metric in self.metrics}
        check_choice("metric", name, by_name)
        return by_name[name]
