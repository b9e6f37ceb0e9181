"""A number for every position of every sequence: mean squared error over all positions, and the mean of draws."""

from collections.abc import Mapping

from torch import Tensor

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.lab.data import Batch
from klformer.lab.training.objectives.positions import OfPositions
from klformer.lab.training.objectives.regression import Regression


class PositionRegression(OfPositions, Regression):
    """One output a position, and its squared distance from the target. All positions have targets.

    Args:
        max_len: Longest sequence: so many predictions are kept of an example.

    Raises:
        ArgumentError: `max_len` is below 1.

    Examples:
        >>> import torch
        >>> from klformer.lab.training.objectives import PositionRegression
        >>> objective = PositionRegression(max_len=3)
        >>> targets = torch.tensor([[1.0, 2.0, 3.0]])
        >>> objective.check_targets(targets)
        >>> objective.measure(torch.tensor([[1.0, 2.0, 4.5]]), targets)["mse"]
        0.75
    """

    def __init__(self, *, max_len: int) -> None:
        check_count("max_len", max_len)
        self.max_len = max_len

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._differences(outputs, batch).square().sum((-2, -1))

    def count(self, outputs: Tensor, batch: Batch) -> int:
        return batch.num_tokens

    def sums(self, outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        difference = self._differences(outputs.detach(), batch)
        return {"mse": difference.square().sum(), "mae": difference.abs().sum()}

    def _kept(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1)

    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        return super().measure(predictions[:, : targets.shape[1]].flatten(), targets.flatten())

    def check_targets(self, targets: Tensor) -> None:
        super().check_targets(targets)
        if targets.dim() != 2:
            raise ArgumentError(f"targets of positions must be (N, length), got {tuple(targets.shape)}")

    def _differences(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the errors (..., B, L), 0 at padding."""
        return (outputs.squeeze(-1) - batch.targets).masked_fill(~batch.key_mask, 0)
