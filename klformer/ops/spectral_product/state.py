"""What is kept of the keys and values seen so far: a state of fixed size, whatever the length is.

    product = sum_j exp(b_j - shift) phi(k_j) [v_j, 1]^T        total = sum_j exp(b_j - shift) [v_j, 1]

The shift keeps every term at or below 1: for exponential maps it is the largest score of each feature (b_j included),
for the others the largest log-weight of a key. It cancels in attention's quotient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.feature_maps import FeatureMap

#: The shift before any key was seen. Finite, so that differences of two are numbers, and far below any score.
NO_KEY = -1e30


@dataclass
class KeyValueState:
    """The keys and values absorbed so far; rows are n (batch, head) pairs."""

    product: Tensor  # (parts n, R, W)
    total: Tensor  # (n, 1, E + 1), for smoothing
    shift: Tensor  # (n, 1, R) for exponential maps, (n, 1, 1) for others with log-weights, (n, 1, 0) without

    def clone(self) -> "KeyValueState":
        return KeyValueState(self.product.clone(), self.total.clone(), self.shift.clone())

    def raise_shift(self, fmap: FeatureMap, largest: Tensor) -> Tensor:
        """Refer to a shift of at least `largest` (n, 1, R or 1), in place; returns the factor (n, 1, R or 1) by which
        what was there has become smaller."""
        raised = torch.maximum(self.shift, largest)
        factor = (self.shift - raised).exp_()
        self.shift = raised
        self.product.mul_(fmap.repeat(factor.transpose(1, 2)))
        if not fmap.exponential:
            self.total.mul_(factor)
        return factor
