"""A number for every sequence, or every pair: mean squared error, and the mean of draws."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from klformer.checks import check_number
from klformer.errors import ArgumentError
from klformer.lab.data import Batch
from klformer.lab.training.metrics import Metric
from klformer.lab.training.objective import Objective


class Regression(Objective):
    """One output, and its squared distance from the target, both in units of `scale` around `mean`.

    Args:
        mean: Of the targets, so that a model need not learn where they are.
        scale: Their deviation, so that it need not learn how far they go. Predictions and metrics are in the targets'
            own units; the loss is not.

    Raises:
        ArgumentError: the scale is not above 0.

    Examples:
        >>> import torch
        >>> from klformer.lab.training.objectives import Regression
        >>> objective = Regression(mean=10.0, scale=2.0)
        >>> objective.answers(torch.tensor([[0.5]]))
        tensor([[11.]])
        >>> objective.measure(torch.tensor([11.0, 8.0]), torch.tensor([12.0, 8.0]))
        {'mse': 0.5, 'mae': 0.5, 'r2': 0.875}
    """

    metrics: ClassVar[Sequence[Metric]] = (
        Metric("mse", higher_is_better=False),
        Metric("mae", higher_is_better=False),
        Metric("r2", higher_is_better=True),
    )

    def __init__(self, *, mean: float = 0.0, scale: float = 1.0) -> None:
        check_number("scale", scale, exclusive=True)
        self.mean, self.scale = mean, scale

    @property
    def num_outputs(self) -> int:
        return 1

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs.squeeze(-1) - (batch.targets - self.mean) / self.scale).square().sum(-1)

    def sums(self, outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        difference = self.predict(outputs.detach(), batch) - batch.targets
        return {"mse": difference.square().sum(), "mae": difference.abs().sum()}

    def predict(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self.mean + self.scale * outputs.squeeze(-1)

    def answers(self, outputs: Tensor) -> Tensor:
        return self.mean + self.scale * outputs

    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        wanted = targets.double()
        difference = predictions.double() - wanted
        squares, spread = difference.square().sum(), (wanted - wanted.mean()).square().sum()
        return {
            "mse": (squares / len(wanted)).item(),
            "mae": difference.abs().mean().item(),
            # Targets that are all the same leave nothing to explain.
            "r2": (1 - squares / spread).item() if spread > 0 else 0.0,
        }

    def combine(self, predictions: Tensor) -> Tensor:
        return predictions.mean(0)

    def check_targets(self, targets: Tensor) -> None:
        if not targets.is_floating_point() or not targets.isfinite().all():
            raise ArgumentError(f"targets of a regression must be finite floats, got {targets.dtype}")
