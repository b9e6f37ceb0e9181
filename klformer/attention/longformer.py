"""Longformer: a sliding window, and a few tokens that see and are seen by all.

out_i = softmax over {j : |i - j| <= w/2 or j < g} of q_i.k_j / sqrt D;  rows i < g see every j

"Longformer: The Long-Document Transformer" (Beltagy et al. 2020). The original has projections of its own for the
global tokens; here they share those of the others, because an attention sees heads only. Long Range Arena has a
window of 512 and no global token; the default here is that window and the CLS token.
Complexity: O(L (w + g)) in time and memory.
Supports: causal (the past half of the window), padding, any length. Not: other keys than its own sequence's, decoding.
"""

import torch
from torch import Tensor

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import register_attention
from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.ops.blocks import attend_blocks, block_positions, cut, cut_mask, join, neighbours
from klformer.ops.softmax_attention import attend, hide, visible_keys


class LongformerAttention(AttentionMechanism):
    """Sliding window and global tokens.

    Args:
        window: Tokens w of the window, w/2 on either side of the query.
        num_global: The first g tokens are global: 1 is CLS, 0 is the sliding window alone.
    """

    supports_cross = False
    supports_decoding = False

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        window: int = 512,
        num_global: int = 1,
    ) -> None:
        super().__init__(sizes)
        check_count("window", window, minimum=2)
        check_count("num_global", num_global, minimum=0)
        if window % 2:
            raise ArgumentError(f"window must be even, half of it on either side of a token, got {window}")
        self.window = window
        self.num_global = num_global

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        k, v = hide(k, key_mask), hide(v, key_mask)
        if q.shape[2] <= self.window // 2 + 1:
            # The window holds the whole sequence.
            return attend(q, k, v, visible_keys(key_mask, q, k, causal=causal))
        num_global = min(self.num_global, q.shape[2])
        out = self._attend_window(q, k, v, key_mask, causal, num_global)
        if num_global == 0:
            return out
        first = q[:, :, :num_global]
        rows = attend(first, k, v, visible_keys(key_mask, first, k, causal=causal))
        return torch.cat([rows, out[:, :, num_global:]], dim=2)

    def _attend_window(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, num_global: int
    ) -> Tensor:
        """Every token to its window and to the global tokens, in blocks of half a window."""
        size, length = self.window // 2, q.shape[2]
        before, after = 1, 0 if causal else 1
        keys, values = (neighbours(cut(x, size), before, after, dim=3) for x in (k, v))
        there = neighbours(cut_mask(key_mask, k, size), before, after, dim=4)
        num_blocks = keys.shape[1]
        key_positions = block_positions(num_blocks, size, before=before, after=after, device=q.device)
        query_positions = block_positions(num_blocks, size, device=q.device).transpose(-1, -2)
        # Global tokens are seen once: as global ones.
        inside = (key_positions - query_positions).abs() <= size
        visible = there & inside & (key_positions >= num_global)
        if causal:
            visible = visible & (key_positions <= query_positions)
        if num_global:
            # The first keys once more, ahead of every block.
            def lead(x: Tensor) -> Tensor:
                return x[:, None, :, :num_global].expand(-1, num_blocks, -1, -1, -1)

            keys, values = torch.cat([lead(k), keys], dim=3), torch.cat([lead(v), values], dim=3)
            seen = cut_mask(key_mask, k, length)[..., :num_global]
            if causal:
                seen = seen & (torch.arange(num_global, device=q.device) <= query_positions)
            shape = (visible.shape[0], num_blocks, 1, size, num_global)
            visible = torch.cat([seen.expand(shape), visible], dim=-1)
        return join(attend_blocks(cut(q, size), keys, values, visible), length)


register_attention("longformer", LongformerAttention, "sliding window and a global CLS token (Longformer)")
