"""Local attention: a token sees the tokens of its block.

out_i = softmax over {j : block(j) = block(i)} of q_i.k_j / sqrt D

Long Range Arena's baseline "Local Attention" (Tay et al. 2021): non-overlapping blocks of 50.
Complexity: O(L b) in time and memory, for blocks of b tokens.
Supports: causal, padding, any length. Not: other keys than its own sequence's, decoding.
"""

from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from klformer.attention.base import AttentionMechanism, AttentionSizes, Capabilities
from klformer.attention.registry import register_attention
from klformer.checks import check_choice, check_count
from klformer.errors import ArgumentError
from klformer.ops.blocks import attend_blocks, block_positions, cut, cut_mask, join, neighbours
from klformer.ops.softmax_attention import hide


class LocalAttention(AttentionMechanism):
    """Attention inside blocks.

    Args:
        block_size: Tokens of a block; Long Range Arena has 50.
        layout: "blocks", non-overlapping, what Long Range Arena means. "sliding", the block and the ones on either side
            of it. "strided", what Long Range Arena's code does: its reshape makes "blocks" of every n-th token, where n
            is the number of blocks in `max_len`, to which that code pads.
    """

    supports_cross = False
    supports_decoding = False

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        block_size: int = 50,
        layout: Literal["blocks", "sliding", "strided"] = "blocks",
    ) -> None:
        super().__init__(sizes)
        check_count("block_size", block_size)
        check_choice("layout", layout, ("blocks", "sliding", "strided"))
        if layout == "strided" and sizes.max_len is None:
            raise ArgumentError("layout='strided' needs max_len: a block is every n-th token, n = max_len / block_size")
        self.block_size, self.layout = block_size, layout

    @classmethod
    def capabilities(cls, **options: Any) -> Capabilities:
        return replace(super().capabilities(), needs_max_len=options.get("layout") == "strided")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        k, v = hide(k, key_mask), hide(v, key_mask)
        if self.layout == "strided":
            return self._attend_strided(q, k, v, key_mask, causal)
        reach = 1 if self.layout == "sliding" else 0
        before, after = reach, 0 if causal else reach
        size, length = self.block_size, q.shape[2]
        keys, values = (neighbours(cut(x, size), before, after, dim=3) for x in (k, v))
        visible = neighbours(cut_mask(key_mask, k, size), before, after, dim=4)
        if causal:
            num_blocks = keys.shape[1]
            key_positions = block_positions(num_blocks, size, before=before, after=after, device=q.device)
            query_positions = block_positions(num_blocks, size, device=q.device).transpose(-1, -2)
            visible = visible & (key_positions <= query_positions)
        return join(attend_blocks(cut(q, size), keys, values, visible), length)

    def _attend_strided(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
        """Blocks of every n-th token: cut into rows of n tokens, and take the columns."""
        assert self.max_len is not None
        stride = -(-self.max_len // self.block_size)
        # (B, b, H, n, D) -> (B, n, H, b, D): position a n + c is row a of block c.
        queries, keys, values = (cut(x, stride).transpose(1, 3) for x in (q, k, v))
        visible = cut_mask(key_mask, k, stride).transpose(1, 4)
        if causal:
            visible = visible & visible.new_ones(2 * (keys.shape[3],)).tril()
        out = attend_blocks(queries, keys, values, visible)
        return join(out.transpose(1, 3), q.shape[2])


register_attention("local", LocalAttention, "softmax attention inside blocks")
