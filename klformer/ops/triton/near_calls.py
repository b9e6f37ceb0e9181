"""Launches of the kernels for neighbours (`near.py`): one forward, two backward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from klformer.ops.triton import near
from klformer.ops.triton.launches import Blocks, inner, launch


class Window(Protocol):
    """Which keys a query sees: those at places i + before - left to i + before + right."""

    @property
    def left(self) -> int: ...
    @property
    def right(self) -> int: ...
    @property
    def before(self) -> int: ...


class _Launcher:
    """The launches of one call.

    Args:
        operands: Queries, keys, values, log-weights, scale, another result and its log-sums, as `near_attention` has
            them; in float32.
        kept: Which keys there are.
        window: Which of them a query sees.
    """

    def __init__(self, operands: Sequence[Tensor | None], kept: Tensor | None, window: Window) -> None:
        q, k, v, bias, scale, far, far_log = operands
        assert q is not None
        assert k is not None
        assert v is not None
        self.q, self.k, self.v = (inner(x) for x in (q, k, v))
        self.rows, (self.length, self.width) = q.shape[:2], q.shape[2:]
        self.num_keys, self.value_dim = v.shape[2:]
        self.has: dict[str, Any] = {
            "HAS_MASK": kept is not None,
            "HAS_BIAS": bias is not None,
            "HAS_FACTOR": scale is not None,
        }
        self.has_far: dict[str, Any] = {"HAS_FAR": far is not None}
        keys = (*self.rows, self.num_keys)
        mask, bias = (self.k if x is None else x.expand(keys) for x in (kept, bias))
        factor = self.q if scale is None else scale.contiguous()
        self.tensors = (self.q, self.k, self.v, mask, bias, factor)
        self.far = tuple(self.q if x is None else x.contiguous() for x in (far, far_log))
        places = (window.left, window.right, window.before)
        self.sizes = (self.length, self.num_keys, self.rows[1], self.width, self.value_dim, *places)
        self.strides = tuple(s for x in (*self.tensors[:3], mask, bias) for s in x.stride()[:3])
        blocks = near_blocks(self.width, self.value_dim, hip=torch.version.hip is not None)
        self.given: dict[str, Any] = {"blocks": blocks, "BM": blocks.tokens, "BN": blocks.tokens}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty((*self.rows, *shape), device=self.q.device)

    def grid(self, tokens: int) -> tuple[int, int]:
        return -(-tokens // self.given["BM"]), self.rows[0] * self.rows[1]


def near_blocks(head_dim: int, value_dim: int, *, hip: bool) -> Blocks:
    """Return sizes of blocks: as many keys as queries."""
    return replace(Blocks.of(head_dim, value_dim, half=False, hip=hip, causal=True), warps=4)


def forward(operands: Sequence[Tensor | None], kept: Tensor | None, window: Window) -> tuple[Tensor, Tensor]:
    """Return results and log-sums."""
    at = _Launcher(operands, kept, window)
    out, log_sum = at.empty(at.length, at.value_dim), at.empty(at.length)
    given = (*at.tensors, *at.far, out, log_sum, *at.sizes, *at.strides)
    launch(near.attend_kernel, at.grid(at.length), *given, **at.has, **at.has_far, **at.given)
    return out, log_sum


def backward(
    operands: Sequence[Tensor | None],
    kept: Tensor | None,
    window: Window,
    results: tuple[Tensor, Tensor],
    d_out: Tensor,
    d_log_sum: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients of all operands."""
    at = _Launcher(operands, kept, window)
    (out, log_sum), d_out = results, d_out.contiguous()
    d_log = out if d_log_sum is None else d_log_sum.contiguous()
    d_q, delta, d_factor = at.empty(at.length, at.width), at.empty(at.length), at.empty(at.length)
    d_far, d_far_log = (
        (None if x is None else torch.empty_like(x) for x in at.far) if at.has_far["HAS_FAR"] else (d_q, d_q)
    )
    given = (*at.tensors, *at.far, out, log_sum, d_out, d_log, d_q, d_factor, d_far, d_far_log, delta)
    has: dict[str, Any] = {**at.has, **at.has_far, "HAS_LOG": d_log_sum is not None}
    launch(near.queries_kernel, at.grid(at.length), *given, *at.sizes, *at.strides, **has, **at.given)
    d_k, d_v = at.empty(at.num_keys, at.width), at.empty(at.num_keys, at.value_dim)
    d_bias = at.empty(at.num_keys)
    given = (*at.tensors, log_sum, d_out, delta, d_k, d_v, d_bias)
    launch(near.keys_kernel, at.grid(at.num_keys), *given, *at.sizes, *at.strides, **at.has, **at.given)
    found: list[Tensor | None] = [d_q, d_k, d_v, None, None, None, None]
    if (bias := operands[3]) is not None:
        found[3] = d_bias.sum_to_size(bias.shape)
    if operands[4] is not None:
        found[4] = d_factor.sum((0, 2))
    if operands[5] is not None:
        found[5:] = [d_far, d_far_log]
    return found
