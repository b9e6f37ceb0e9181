"""Linformer: keys and values projected along the sequence to a few rows.

out = softmax(q (P^T k)^T / sqrt D) (P^T v),   P (max_len, r) learned

"Linformer: Self-Attention with Linear Complexity" (Wang et al. 2020). Long Range Arena: one P for keys and values and
all heads, r = 16 (32 for Text); the original has r = 256 and several ways of sharing.
Complexity: O(L r) in time and memory; max_len r parameters a layer.
Supports: other keys than its own sequence's, padding (a padded key adds nothing to any row), any length up to max_len.
Not: causal, because every row mixes all positions; decoding.
"""

import torch
from torch import Tensor, nn

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import register_attention
from klformer.checks import check_count, check_flag
from klformer.ops.softmax_attention import attend, hide


class LinformerAttention(AttentionMechanism):
    """Softmax attention to projected keys and values.

    Args:
        max_len: Longest sequence of keys.
        rank: Rows r that are left of a sequence.
        share_kv: One projection for keys and values, or one for each.
    """

    supports_causal = False
    supports_decoding = False
    needs_max_len = True

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        rank: int = 16,
        share_kv: bool = True,
    ) -> None:
        super().__init__(sizes)
        check_count("rank", rank)
        check_flag("share_kv", share_kv)
        max_len = sizes.known_max_len()
        self.key_projection = nn.Parameter(nn.init.xavier_uniform_(torch.empty(max_len, rank)))
        self.value_projection: nn.Parameter | None = None
        if not share_kv:
            self.value_projection = nn.Parameter(nn.init.xavier_uniform_(torch.empty(max_len, rank)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        value_projection = self.key_projection if self.value_projection is None else self.value_projection
        rows_k = _project(hide(k, key_mask), self.key_projection)
        rows_v = _project(hide(v, key_mask), value_projection)
        return attend(q, rows_k, rows_v)


def _project(x: Tensor, projection: Tensor) -> Tensor:
    """(B, H, S, D) -> (B, H, r, D)."""
    return projection[: x.shape[2]].T.to(x.dtype) @ x


register_attention("linformer", LinformerAttention, "keys and values projected to a few rows (Linformer)")
