"""BigBird: blocks that see their neighbours, the first and the last block, and a few random ones.

A block n of queries sees the keys of the blocks
    n-1, n, n+1                 window
    0, last                     global; and the queries of blocks 0 and last see everything
    r of the others, at random  drawn without replacement, by head, from a seed that is saved with the weights

"Big Bird: Transformers for Longer Sequences" (Zaheer et al. 2020). Long Range Arena: blocks of 64, a window of 3
blocks, first and last block global, 3 random blocks. "Last" is the last block of a sequence without its padding, and
the random blocks come from the blocks before it, so that padding changes nothing.
Complexity: O(L b (w + 2 + r)) in time and memory.
Supports: causal (the random blocks come from the past, and the last block is not global: it would give the length
away), padding, any length. Not: other keys than its own sequence's, decoding step by step.
"""

import torch
from torch import Tensor

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import register_attention
from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.ops.blocks import attend_blocks, block_positions, cut, cut_mask, join
from klformer.ops.hashing import hashed_uniform
from klformer.ops.softmax_attention import attend, hide, visible_keys


class BigBirdAttention(AttentionMechanism):
    """Window, global and random blocks.

    Args:
        block_size: Tokens of a block.
        window_blocks: Blocks of the window, an odd number.
        random_blocks: Random blocks of every block of queries.
    """

    supports_cross = False
    supports_decoding = False

    seed: Tensor

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        block_size: int = 64,
        window_blocks: int = 3,
        random_blocks: int = 3,
    ) -> None:
        super().__init__(sizes)
        check_count("block_size", block_size)
        check_count("window_blocks", window_blocks)
        check_count("random_blocks", random_blocks, minimum=0)
        if window_blocks % 2 == 0:
            raise ArgumentError(f"window_blocks must be odd, the block and as many on either side, got {window_blocks}")
        self.block_size = block_size
        self.reach = window_blocks // 2
        self.random_blocks = random_blocks
        self.register_buffer("seed", torch.randint(2**31, ()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        length, size = q.shape[2], self.block_size
        if length == 0 or q.shape[0] == 0:
            return v * 0
        k, v = hide(k, key_mask), hide(v, key_mask)
        queries, keys, values = cut(q, size), cut(k, size), cut(v, size)
        there = cut_mask(key_mask, k, size)
        num_blocks = keys.shape[1]
        last = last_block(there)
        chosen, wanted = self.blocks_seen(num_blocks, last, causal)

        positions = block_positions(num_blocks, size, device=q.device)
        # (B, N, H, blocks seen, b) of what a block of queries sees
        visible = (
            wanted.unsqueeze(-1) & _gather(there.expand(q.shape[0], -1, chosen.shape[2], 1, size), chosen)[..., 0, :]
        )
        visible = visible.flatten(3).unsqueeze(3)
        if causal:
            seen_positions = (chosen.unsqueeze(-1) * size + torch.arange(size, device=q.device)).flatten(3).unsqueeze(3)
            visible = visible & (seen_positions <= positions.transpose(-1, -2))
        seen_keys, seen_values = (_gather(x, chosen).flatten(3, 4) for x in (keys, values))
        out = attend_blocks(queries, seen_keys, seen_values, visible)
        return join(self._with_global_rows(out, queries, k, v, key_mask, last, causal), length)

    def blocks_seen(self, num_blocks: int, last: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Which blocks of keys each block of queries sees.

        Args:
            num_blocks: Blocks N of queries.
            last: The last block (1|B,) that holds keys.

        Returns:
            Indices (1|B, N, H, n), and whether each counts: those that do are all different.
        """
        device, heads = last.device, self.num_heads
        row = torch.arange(num_blocks, device=device).view(1, num_blocks, 1)
        last = last.view(-1, 1, 1).expand(-1, num_blocks, heads)
        row = row.expand_as(last)
        none = torch.full_like(row, num_blocks + 1)  # beyond all blocks: not there
        window = [row + shift for shift in range(-self.reach, (0 if causal else self.reach) + 1)]
        fixed = [torch.zeros_like(row), *window] + ([] if causal else [last])
        fixed = [torch.where((block >= 0) & (block <= last), block, none) for block in fixed]
        ordered = torch.stack(fixed, dim=-1).sort(-1).values
        repeated = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
        ordered = ordered.masked_fill(repeated, num_blocks + 1).sort(-1).values
        # What may be drawn: blocks up to the last (causal: up to the row's own) that are not there already.
        limit = torch.minimum(row, last) if causal else last
        num_left = limit + 1 - (ordered <= limit.unsqueeze(-1)).sum(-1)
        drawn = [*_draw(self.seed, ordered, num_left, self.random_blocks)]
        chosen = torch.cat([ordered, *(block.unsqueeze(-1) for block, _ in drawn)], dim=-1)
        wanted = torch.cat([ordered <= last.unsqueeze(-1), *(there.unsqueeze(-1) for _, there in drawn)], dim=-1)
        return chosen.masked_fill(~wanted, 0), wanted

    def _with_global_rows(
        self, out: Tensor, queries: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, last: Tensor, causal: bool
    ) -> Tensor:
        """Blocks of results with those of the first and, unless causal, the last block over all keys."""
        num_blocks = queries.shape[1]
        visible = visible_keys(key_mask, queries[:, 0], k, causal=causal)
        row = torch.arange(num_blocks, device=k.device).view(1, num_blocks, 1, 1, 1)
        first = attend(queries[:, 0], k, v, visible).unsqueeze(1)
        if not causal:
            final_queries = queries[torch.arange(queries.shape[0], device=k.device), last.expand(queries.shape[0])]
            final = attend(final_queries, k, v, visible).unsqueeze(1)
            out = torch.where(row == last.view(-1, 1, 1, 1, 1), final, out)
        return torch.where(row == 0, first, out)


def last_block(there: Tensor) -> Tensor:
    """(1|B,): the last block of (1|B, N, 1, 1, b) with a key; the first if there is none."""
    holds_keys = there.flatten(2).any(-1)
    return (holds_keys * torch.arange(holds_keys.shape[1], device=there.device)).amax(-1)


def _draw(seed: Tensor, excluded: Tensor, num_left: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` different blocks for every (row, head), none of the `excluded`, and whether there were enough of them.

    Args:
        excluded: (1|B, N, H, n), ascending.
        num_left: (1|B, N, H), how many blocks are not excluded.
    """
    rows = torch.arange(excluded.shape[1], device=seed.device).view(-1, 1)
    heads = torch.arange(excluded.shape[2], device=seed.device)
    ranks: list[Tensor] = []  # among what is left, ascending
    drawn = []
    for slot in range(count):
        uniform = hashed_uniform(seed, rows, heads, slot)
        rank = (uniform * (num_left - slot)).floor().long().clamp(min=0)
        for earlier in ranks:
            rank = rank + (rank >= earlier)
        ranks = list(torch.stack([*ranks, rank]).sort(0).values)
        block = rank
        for taken in excluded.unbind(-1):
            block = block + (block >= taken)
        drawn.append((block, num_left > slot))
    return drawn


def _gather(blocks: Tensor, chosen: Tensor) -> Tensor:
    """(B, N, H, b, D) by chosen (1|B, N, H, n) -> (B, N, H, n, b, D)."""
    batch, num_blocks, heads = blocks.shape[:3]
    device = blocks.device
    batch_index = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    head_index = torch.arange(heads, device=device).view(1, 1, -1, 1)
    rows = (batch_index * num_blocks + chosen) * heads + head_index
    flat = blocks.flatten(0, 2)
    return flat.index_select(0, rows.flatten()).view(*rows.shape, *blocks.shape[3:])


register_attention("bigbird", BigBirdAttention, "window, global and random blocks (BigBird)")
