"""Decoding: tokens are added to a state of fixed size, which answers queries at the same cost at any position.

The same arithmetic as the product over a whole sequence, one call at a time. For inference: no gradients flow through
a state, and a state that was given is left as it is.
"""

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.chunked.chunk import absorb_chunk, attend_chunk, empty_state
from klformer.ops.spectral_product.chunked.tiling import Tile, chunk_bounds
from klformer.ops.spectral_product.operands import SpectralKernel, SpectralOperands
from klformer.ops.spectral_product.state import KeyValueState

#: Tokens of a prompt that are worked on at a time.
PROMPT_CHUNK = 256


def initial_state(
    kernel: SpectralKernel, *, batch_size: int, num_heads: int, head_dim: int, value_dim: int, like: Tensor
) -> KeyValueState:
    """The state before the first key, on the device of `like` and at least in its precision."""
    k, v = (like.new_empty(batch_size, num_heads, 0, size) for size in (head_dim, value_dim))
    return empty_state(_tile(kernel, k, v))


@torch.no_grad()
def absorb(
    kernel: SpectralKernel,
    state: KeyValueState,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> KeyValueState:
    """The state after the keys (B, H, S, D) and values (B, H, S, E).

    Args:
        key_mask: (B or 1, H or 1, S), True = keep.
        key_bias: Log-weights of the keys, (B or 1, H or 1, S); finite where the key is kept.
    """
    _check_rows(state, k)
    dtype = state.product.dtype
    with full_precision(k):
        tile = _tile(kernel, k.to(dtype), v.to(dtype), key_mask=key_mask, key_bias=key_bias)
        after = state.clone()
        for start, stop in chunk_bounds(k.shape[2], PROMPT_CHUNK):
            absorb_chunk(after, tile, start, stop)
    return after


@torch.no_grad()
def read(kernel: SpectralKernel, state: KeyValueState, q: Tensor) -> Tensor:
    """Results (B, H, L, E) of the queries (B, H, L, D), each against all keys absorbed so far."""
    _check_rows(state, q)
    batch, heads, length, _ = q.shape
    queries = q.to(state.product.dtype)
    value_dim = state.total.shape[-1] - 1
    out = q.new_empty(batch, heads, length, value_dim)
    with full_precision(q):
        tile = _tile(kernel, queries, queries.new_empty(batch, heads, length, value_dim))
        for start, stop in chunk_bounds(length, PROMPT_CHUNK):
            out.flatten(0, 1)[:, start:stop] = attend_chunk(state, tile, tile.queries(start, stop)).out
    return out


def _tile(
    kernel: SpectralKernel, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None
) -> Tile:
    """All rows in one tile."""
    if key_bias is None and not kernel.feature_map.exponential:
        # Keys without a log-weight may follow keys with one: the state must refer to a shift from the start.
        key_bias = k.new_zeros(1, 1, k.shape[2])
    operands = SpectralOperands(kernel, k, k, v, key_mask=key_mask, key_bias=key_bias)
    return Tile(operands, slice(0, k.shape[0]), slice(0, k.shape[1]))


def _check_rows(state: KeyValueState, tokens: Tensor) -> None:
    """Raises ArgumentError if the tokens (B, H, ., D) are not for the rows of the state."""
    batch, heads = tokens.shape[:2]
    if state.total.shape[0] != batch * heads:
        raise ArgumentError(f"the state is for {state.total.shape[0] // heads} sequences, got a batch of {batch}")
