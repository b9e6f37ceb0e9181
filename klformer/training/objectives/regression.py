"""A number for every sequence, or every pair: mean squared error, and the mean of draws."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from klformer.data import Batch
from klformer.data.sequences import AnyArray
from klformer.errors import ArgumentError
from klformer.training.metrics import Metric
from klformer.training.objective import Objective


class Regression(Objective):
    """One output, and its squared distance from the target."""

    metrics: ClassVar[Sequence[Metric]] = (
        Metric("mse", higher_is_better=False),
        Metric("mae", higher_is_better=False),
        Metric("r2", higher_is_better=True),
    )

    @property
    def num_outputs(self) -> int:
        return 1

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs.squeeze(-1) - batch.targets).square().sum(-1)

    def sums(self, outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        difference = outputs.detach().squeeze(-1) - batch.targets
        return {"mse": difference.square().sum(), "mae": difference.abs().sum()}

    def predict(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.squeeze(-1)

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

    def random_targets(self, generator: np.random.Generator, count: int) -> AnyArray:
        return generator.normal(size=count)

    def check_targets(self, targets: Tensor) -> None:
        if not targets.is_floating_point() or not targets.isfinite().all():
            raise ArgumentError(f"targets of a regression must be finite floats, got {targets.dtype}")
