"""One of several classes for some positions of every sequence: cross-entropy and accuracy over the positions asked for.

Targets (N, length) hold IGNORED where nothing is asked. Every position that is asked for counts the same, whatever
sequence it is in.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.lab.data import Batch
from klformer.lab.data.sequences import IGNORED
from klformer.lab.training.metrics import Metric
from klformer.lab.training.objective import Objective


class OfPositions(Objective):
    """An objective with a target for every position, of which it keeps a number each."""

    of_positions: ClassVar[bool] = True
    max_len: int

    @abstractmethod
    def _kept(self, outputs: Tensor) -> Tensor:
        """Return what is kept of outputs (n, B, L, num_outputs), (n, B, L)."""

    @property
    def prediction_shape(self) -> tuple[int, ...]:
        return (self.max_len,)

    def predict(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self.predict_part(outputs, batch, 0)

    def predict_part(self, outputs: Tensor, batch: Batch, start: int) -> Tensor:
        kept = self._kept(outputs)
        return nn.functional.pad(kept, (start, self.max_len - start - kept.shape[-1]))


class PositionClassification(OfPositions):
    """Class scores of every position, of which the highest is the prediction.

    Args:
        num_classes: Number of classes; targets are 0 to num_classes - 1, or IGNORED.
        max_len: Longest sequence: so many predictions are kept of an example.

    Raises:
        ArgumentError: there are fewer than two classes, or no positions.

    Examples:
        Of three positions two are asked for, and one of these is right:

        >>> import torch
        >>> from klformer.lab.data.sequences import IGNORED
        >>> from klformer.lab.training.objectives import PositionClassification
        >>> objective = PositionClassification(num_classes=2, max_len=3)
        >>> targets = torch.tensor([[1, IGNORED, 0]])
        >>> objective.check_targets(targets)
        >>> objective.measure(torch.tensor([[1, 0, 1]]), targets)
        {'accuracy': 0.5, 'all_right': 0.0}
    """

    metrics: ClassVar[Sequence[Metric]] = (
        Metric("accuracy", higher_is_better=True, percent=True),
        Metric("all_right", higher_is_better=True, percent=True),
    )
    prediction_dtype: ClassVar[torch.dtype] = torch.long
    combination: ClassVar[str] = "voting"

    def __init__(self, *, num_classes: int, max_len: int) -> None:
        check_count("num_classes", num_classes, minimum=2)
        check_count("max_len", max_len)
        self.num_classes = num_classes
        self.max_len = max_len

    @property
    def num_outputs(self) -> int:
        return self.num_classes

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        targets = batch.targets.expand(outputs.shape[:-1])
        losses = nn.functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return losses.view(targets.shape).sum((-2, -1))

    def count(self, outputs: Tensor, batch: Batch) -> int:
        return int((batch.targets != IGNORED).sum())

    def sums(self, outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        # IGNORED is no class, so that positions without a target are never right.
        return {"accuracy": (outputs.argmax(-1) == batch.targets).sum()}

    def _kept(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        asked = targets != IGNORED
        right = (predictions[:, : targets.shape[1]] == targets) & asked
        return {
            "accuracy": (right.sum() / asked.sum()).item(),
            "all_right": (right == asked).all(1).float().mean().item(),
        }

    def combine(self, predictions: Tensor) -> Tensor:
        # How many draws agree with each draw; of equally many votes the lowest class wins.
        votes = (predictions.unsqueeze(0) == predictions.unsqueeze(1)).sum(0)
        winner = (votes * self.num_classes - predictions).argmax(0, keepdim=True)
        return predictions.gather(0, winner).squeeze(0)

    def check_targets(self, targets: Tensor) -> None:
        if targets.dtype != torch.long or targets.dim() != 2:
            raise ArgumentError(
                f"targets of positions must be int64 (N, length), got {targets.dtype} {tuple(targets.shape)}"
            )
        asked = targets[targets != IGNORED]
        if not len(asked):
            raise ArgumentError(f"targets of positions must ask for something, all are {IGNORED}")
        if asked.min() < 0 or asked.max() >= self.num_classes:
            raise ArgumentError(
                f"targets of {self.num_classes} classes must be from 0 to {self.num_classes - 1}, or {IGNORED} where "
                f"nothing is asked, got {asked.min().item()} to {asked.max().item()}"
            )
