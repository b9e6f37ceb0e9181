"""What is kept of the keys and values seen so far: a state of fixed size, whatever the length is.

    product = sum_j exp(b_j - shift) [v_j, 1] phi(k_j)^T        total = sum_j exp(b_j - shift) [v_j, 1]

The shift keeps every term near 1 or below: for exponential maps it is about the largest score of each feature (b_j
included), for the others the largest log-weight of a key. It cancels in attention's quotient. Scores of exponential
maps and their shifts are to base 2.
"""

from dataclasses import dataclass

from torch import Tensor

#: The shift before any key was seen. Finite, so that differences of two are numbers, and far below any score.
NO_KEY = -1e30


@dataclass
class KeyValueState:
    """The keys and values absorbed so far; rows are n (batch, head) pairs."""

    product: Tensor  # (n, E + 1, F)
    total: Tensor  # (n, 1, E + 1), for smoothing
    shift: Tensor  # (n, 1, R) for exponential maps, (n, 1, 1) for others

    def clone(self) -> "KeyValueState":
        return KeyValueState(self.product.clone(), self.total.clone(), self.shift.clone())
