"""Envelopes: factors of a kernel that belong to the key alone, as log-weights for `key_bias`.

The same factor of a query would multiply its numerator and its denominator alike and is never computed.
"""

from typing import Any

import torch
from torch import Tensor

from klformer.ops.precision import full_precision


def gaussian_envelope(x: Tensor, coefficient: float, key_mask: Tensor | None = None) -> Tensor:
    """-c |x|^2 of every key, (B, H, S, D) -> (B, H, S): the exp(-c |k|^2) of Eq. 9.

    Args:
        coefficient: c.
        key_mask: (B or 1, H or 1, S), True = keep. What is not kept gets 0, whatever it holds, and gradient 0.
    """
    with full_precision(x) as dtype:
        squares: Tensor = _SquaredNorm.apply(x.to(dtype), key_mask)  # type: ignore[no-untyped-call]
        return squares * -coefficient


class _SquaredNorm(torch.autograd.Function):
    """|x|^2 along the last axis. Autograd's own way writes out the squares, and reads x three times in backward."""

    @staticmethod
    def forward(x: Tensor, key_mask: Tensor | None) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1).square()
        return squares if key_mask is None else squares.masked_fill(~key_mask, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_squares: Tensor) -> tuple[Tensor, None]:
        x, key_mask = ctx.saved_tensors
        d_x = x * (2 * d_squares).unsqueeze(-1)
        return (d_x if key_mask is None else d_x.masked_fill(~key_mask.unsqueeze(-1), 0)), None
