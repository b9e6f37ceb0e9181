"""Softmax attention through torch's scaled_dot_product_attention: the quadratic yardstick.

out_i = sum_j softmax_j(q_i.k_j / sqrt D) v_j
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.attention.base import AttentionMechanism
from klformer.attention.registry import register_attention
from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.ops.softmax_attention import attend, hide, visible_keys


@dataclass(frozen=True)
class KeyValueCache:
    """All keys (B, H, S, D), values (B, H, S, E) and their mask (B, S) so far; it grows with the sequence."""

    k: Tensor
    v: Tensor
    key_mask: Tensor


class SoftmaxAttention(AttentionMechanism):
    """Softmax attention, O(L^2) in time: causal or not, own or other keys, padding, decoding with a growing cache."""

    cost = "L^2"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        if key_mask is None:
            return attend(q, k, v, causal=causal)
        visible = visible_keys(key_mask, q, k, causal=causal)
        return attend(q, hide(k, key_mask), hide(v, key_mask), visible)

    def initial_state(self, batch_size: int) -> KeyValueCache:
        return KeyValueCache(
            k=self._anchor.new_empty(batch_size, self.num_heads, 0, self.head_dim),
            v=self._anchor.new_empty(batch_size, self.num_heads, 0, self.value_dim),
            key_mask=self._anchor.new_empty(batch_size, 0, dtype=torch.bool),
        )

    @torch.no_grad()
    def absorb(self, state: KeyValueCache, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> KeyValueCache:
        self._check_operands(k, k, v, key_mask, causal=False)
        _check_state(state, k)
        if key_mask is None:
            key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        return KeyValueCache(
            k=torch.cat([state.k.to(k.dtype), k], dim=2),
            v=torch.cat([state.v.to(v.dtype), v], dim=2),
            key_mask=torch.cat([state.key_mask, key_mask], dim=1),
        )

    @torch.no_grad()
    def read(self, state: KeyValueCache, q: Tensor) -> Tensor:
        _check_state(state, q)
        self._check_operands(q, state.k, state.v, state.key_mask, causal=False)
        return self.attend(q, state.k, state.v, key_mask=state.key_mask, causal=False)


def _check_state(state: KeyValueCache, tokens: Tensor) -> None:
    if not isinstance(state, KeyValueCache):
        raise ArgumentTypeError(
            f"state must be of this attention's own, as of initial_state, got {type(state).__name__}"
        )
    if tokens.shape[0] != state.k.shape[0]:
        raise ArgumentError(f"the state is for {state.k.shape[0]} sequences, got a batch of {tokens.shape[0]}")


register_attention("softmax", SoftmaxAttention, "softmax attention, quadratic (torch's scaled_dot_product_attention)")
