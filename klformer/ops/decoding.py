"""Decoding: the keys seen so far as a state of fixed size, to which tokens are added and which answers queries.

The same arithmetic as the product over a whole sequence, one call at a time, so that a token costs the same at any
position. For inference: no gradients flow through a state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.feature_maps import make_feature_map
from klformer.ops.steps import Carry
from klformer.ops.tiling import Problem, Tile, chunk_bounds

#: Tokens of a prompt that are worked on at a time.
PROMPT_CHUNK = 256


@dataclass(frozen=True)
class SpectralState:
    """Everything that attention needs of the keys and values seen so far. Rows are (batch, head) pairs."""

    product: Tensor  # (copies * B * H, R, W): sum of phi(k) [v, 1]^T
    total: Tensor  # (B * H, 1, E + 1): sum of [v, 1]
    shift: Tensor  # (B * H, 1, R or 0): the keys' maxima that the product refers to


@dataclass(frozen=True)
class SpectralDecoder:
    """`spectral_product` taken apart for decoding; its arguments are explained there."""

    omega: Tensor | None
    mean: Tensor | None
    feature_map: str
    norm_coefficient: float
    smoothing: float

    def initial_state(
        self, batch_size: int, num_heads: int, head_dim: int, value_dim: int, like: Tensor
    ) -> SpectralState:
        """The state before the first key, on the device of `like` and at least in its precision."""
        empty = like.new_empty(batch_size, num_heads, 0, head_dim)
        carry = Carry.before_first(self._tile(empty, like.new_empty(batch_size, num_heads, 0, value_dim), None))
        return SpectralState(carry.state, carry.total, carry.shift)

    @torch.no_grad()
    def absorb(self, state: SpectralState, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> SpectralState:
        """The state after the keys (B, H, S, D) and values (B, H, S, E); the given one is left as it is."""
        _check_rows(state, k)
        k, v = k.to(state.product.dtype), v.to(state.product.dtype)
        with torch.autocast(k.device.type, enabled=False):
            tile = self._tile(k, v, key_mask)
            carry = Carry(state.product.clone(), state.total.clone(), state.shift.clone())
            for start, stop in chunk_bounds(k.shape[2], PROMPT_CHUNK):
                carry.absorb(tile, start, stop)
        return SpectralState(carry.state, carry.total, carry.shift)

    @torch.no_grad()
    def read(self, state: SpectralState, q: Tensor) -> Tensor:
        """Results (B, H, L, E) of the queries (B, H, L, D), each against all keys absorbed so far."""
        _check_rows(state, q)
        batch, heads, length, _ = q.shape
        queries = q.to(state.product.dtype)
        value_dim = state.total.shape[-1] - 1
        out = q.new_empty(batch, heads, length, value_dim)
        with torch.autocast(q.device.type, enabled=False):
            tile = self._tile(queries, queries.new_empty(batch, heads, length, value_dim), None)
            carry = Carry(state.product, state.total, state.shift)
            for start, stop in chunk_bounds(length, PROMPT_CHUNK):
                out.flatten(0, 1)[:, start:stop] = carry.attend(tile, tile.queries(start, stop)).out
        return out

    def _tile(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tile:
        """All rows in one tile."""
        scale = 1 if self.omega is None else self.omega.shape[-2]
        fmap = make_feature_map(self.feature_map, self.norm_coefficient)
        problem = Problem(k, k, v, self.omega, self.mean, key_mask, fmap, self.smoothing * scale)
        return Tile(problem, slice(0, k.shape[0]), slice(0, k.shape[1]))


def _check_rows(state: SpectralState, tokens: Tensor) -> None:
    """Raises ValueError if the tokens (B, H, ., D) are not for the rows of the state."""
    batch, heads = tokens.shape[:2]
    if state.total.shape[0] != batch * heads:
        raise ArgumentError(f"the state is for {state.total.shape[0] // heads} sequences, got a batch of {batch}")
