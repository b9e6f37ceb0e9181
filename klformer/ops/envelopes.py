"""Envelopes: factors of a kernel that belong to the key alone, as log-weights for `key_bias`.

    gaussian   -c |k|^2                         the exp(-c |k|^2) of Eq. 9 of the paper
    matched    -|M k|^2 / 2                     right for frequencies M^T n with n ~ N(0, I)
    simplex    -log 1/R sum_r exp(omega_r.k)    the features of a key sum to R, whatever the frequencies are

The same factor of a query would multiply its numerator and its denominator alike and is never computed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from klformer.ops.precision import full_precision
from klformer.ops.transforms import gradients_of, is_derived_again, is_transformed


def gaussian_envelope(x: Tensor, coefficient: float, key_mask: Tensor | None = None) -> Tensor:
    """-c |x|^2 of every key, (B, H, S, D) -> (B, H, S): the exp(-c |k|^2) of Eq. 9.

    Args:
        coefficient: c.
        key_mask: (B or 1, H or 1, S), True = keep. What is not kept gets 0, whatever it holds, and gradient 0.
    """
    with full_precision(x) as dtype:
        if is_transformed(x):
            kept = x if key_mask is None else x.masked_fill(~key_mask.unsqueeze(-1), 0)
            return kept.to(dtype).square().sum(-1) * -coefficient
        if not torch.is_grad_enabled() and key_mask is None:
            return torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square_().mul_(-coefficient)
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


def matched_envelope(x: Tensor, linear_map: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """-|M x|^2 / 2 of every key, (B, H, S, D) -> (B, H, S); M (H or 1, D, D). With a mask as `gaussian_envelope`."""
    with full_precision(x) as dtype:
        x = x.to(dtype)
        if key_mask is not None:
            x = x.masked_fill(~key_mask.unsqueeze(-1), 0)
        return gaussian_envelope(x @ linear_map.to(dtype).transpose(-1, -2), 0.5)


def simplex_envelope(x: Tensor, omega: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """-log 1/R sum_r exp(omega_r.x) of every key, (B, H, S, D) and (H or 1, R, D) -> (B, H, S).

    Features are made chunk by chunk, and again in backward. With a mask as `gaussian_envelope`.
    """
    with full_precision(x) as dtype:
        log_sum = _log_sum if is_transformed(x, omega) else _log_sum_op
        return math.log(omega.shape[-2]) - log_sum(x.to(dtype), omega.to(dtype), key_mask)


def _log_sum(x: Tensor, omega: Tensor, key_mask: Tensor | None) -> Tensor:
    """What the op is, in plain operations."""
    kept = x if key_mask is None else x.masked_fill(~key_mask.unsqueeze(-1), 0)
    return (kept @ omega.transpose(-1, -2)).logsumexp(-1)


#: Scores that are held at a time, in numbers.
_CHUNK_SCORES = 2**19


def _chunks(x: Tensor, omega: Tensor, key_mask: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Positions, keys (B, H, chunk, D) without padding, and scores (B, H, chunk, R), a chunk of the sequence each."""
    batch, heads, length, _ = x.shape
    size = max(16, _CHUNK_SCORES // max(1, batch * heads * omega.shape[-2]))
    for start in range(0, length, size):
        here = slice(start, start + size)
        keys = x[:, :, here]
        if key_mask is not None:
            keys = keys.masked_fill(~key_mask[:, :, here].unsqueeze(-1), 0)
        yield here, keys, keys @ omega.transpose(-1, -2)


@torch.library.custom_op("klformer::log_sum_of_features", mutates_args=())
def _log_sum_op(x: Tensor, omega: Tensor, key_mask: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[:3])
    for here, _, scores in _chunks(x, omega, key_mask):
        out[:, :, here] = scores.logsumexp(-1)
    return out


@_log_sum_op.register_fake
def _(x, omega, key_mask):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[:3])


@torch.library.custom_op("klformer::log_sum_of_features_backward", mutates_args=())
def _log_sum_backward_op(
    d_out: Tensor, out: Tensor, x: Tensor, omega: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if key_mask is not None:
        d_out = d_out.masked_fill(~key_mask, 0)
    d_x, d_omega = torch.empty_like(x), torch.zeros_like(omega)
    for here, keys, scores in _chunks(x, omega, key_mask):
        shares = scores.sub_(out[:, :, here].unsqueeze(-1)).exp_().mul_(d_out[:, :, here].unsqueeze(-1))
        d_x[:, :, here] = shares @ omega
        d_omega += (shares.transpose(-1, -2) @ keys).sum(0).sum_to_size(omega.shape)
    return d_x, d_omega


@_log_sum_backward_op.register_fake
def _(d_out, out, x, omega, key_mask):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(omega)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output, *inputs)


def _autograd(ctx, d_out):  # type: ignore[no-untyped-def]
    out, x, omega, key_mask = ctx.saved_tensors
    if is_derived_again(d_out):
        needs = ctx.needs_input_grad[:2]

        def log_sums(pair: Sequence[Tensor | None]) -> list[Tensor]:
            return [_log_sum(cast(Tensor, pair[0]), cast(Tensor, pair[1]), key_mask)]

        return *gradients_of(log_sums, (x, omega), needs, [d_out]), None
    d_x, d_omega = _log_sum_backward_op(d_out, out, x, omega, key_mask)
    return d_x, d_omega, None


_log_sum_op.register_autograd(_autograd, setup_context=_setup_context)
