"""Sparse Sinkhorn attention: every block of queries sees its own keys and those of one other, matched block.

    R = sinkhorn(F(sum of the keys of each block))      (N, N), nearly a permutation; F learned
    k'_n = sum_m R_nm k_m,  v'_n = sum_m R_nm v_m       blocks sorted softly
    block n attends to [k_n, k'_n]

"Sparse Sinkhorn Attention" (Tay et al. 2020). Long Range Arena: blocks of 50, one iteration; its code sorts by a
softmax unless told otherwise and sums over blocks before it sorts them, which makes all sorted blocks the same. Here
blocks are matched as in the paper. The Gumbel noise of the paper's training is left out, so that a state dict gives
one result.
Complexity: O(L b + (L/b)^2 + (L/b) L) in time, the last for sorting; memory O(L + (L/b)^2). At a fixed block size the
terms in (L/b) are quadratic with a small factor.
Supports: padding (an empty block is matched with none; a mixed token makes up for those that are not there), any
length up to max_len, causal: block n is matched with blocks before it only, and the columns are normalised over the
rows so far.
Not: other keys than its own sequence's, decoding step by step.
"""

import torch
from torch import Tensor, nn

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import register_attention
from klformer.checks import check_count, check_number
from klformer.ops.blocks import attend_blocks, block_positions, cut, cut_mask, join
from klformer.ops.precision import full_precision
from klformer.ops.sinkhorn import log_sinkhorn, mix
from klformer.ops.softmax_attention import hide


class SinkhornAttention(AttentionMechanism):
    """Own and matched block.

    Args:
        max_len: Longest sequence: the network that matches has an output for every block.
        block_size: Tokens b of a block.
        iterations: Normalisations of rows and columns.
        temperature: Of the matching; lower is nearer to a permutation.
    """

    supports_cross = False
    supports_decoding = False
    needs_max_len = True
    cost = "L^2 / b"

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        block_size: int = 50,
        iterations: int = 1,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(sizes)
        check_count("block_size", block_size)
        check_count("iterations", iterations)
        check_number("temperature", temperature, exclusive=True)
        max_len = sizes.known_max_len()
        self.block_size = block_size
        self.iterations = iterations
        self.temperature = temperature
        max_blocks = -(-max_len // block_size)
        self.sort_weight = nn.Parameter(
            nn.init.xavier_uniform_(torch.empty(sizes.num_heads, sizes.head_dim, max_blocks))
        )
        self.sort_bias = nn.Parameter(torch.zeros(sizes.num_heads, 1, max_blocks))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        length, size = q.shape[2], self.block_size
        k, v = hide(k, key_mask), hide(v, key_mask)
        keys, values = cut(k, size), cut(v, size)
        there = cut_mask(key_mask, k, size)
        sorted_keys, sorted_values, sorted_there = self._sort(keys, values, there, causal)
        own = there.expand(-1, -1, self.num_heads, -1, -1)
        if causal:
            positions = block_positions(keys.shape[1], size, device=q.device)
            own = own & (positions <= positions.transpose(-1, -2))
        own = own.expand(sorted_there.shape[0], -1, -1, -1, -1)
        sorted_there = sorted_there.expand(-1, -1, -1, own.shape[3], -1)
        out = attend_blocks(
            cut(q, size),
            torch.cat([keys, sorted_keys], dim=3),
            torch.cat([values, sorted_values], dim=3),
            torch.cat([own, sorted_there], dim=-1),
        )
        return join(out, length)

    def _sort(self, keys: Tensor, values: Tensor, there: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values mixed by R, and which of them there are: (B, N, H, 1, b)."""
        log_matching = self.log_matching(keys, there, causal)
        with full_precision(keys) as full:
            present = there[:, :, 0, 0].expand(keys.shape[0], -1, -1)
            mixed, is_there = mix(log_matching, present, keys.to(full), values.to(full))
        return mixed[0].to(keys.dtype), mixed[1].to(values.dtype), is_there.unsqueeze(3)

    def log_matching(self, keys: Tensor, there: Tensor, causal: bool) -> Tensor:
        """log R (B, H, N, N), rows: blocks of queries, columns: blocks of keys (B, N, H, b, D)."""
        num_blocks = keys.shape[1]
        with full_precision(keys) as full:
            pooled = keys.to(full).sum(3).transpose(1, 2)
            weight, bias = self.sort_weight[..., :num_blocks].to(full), self.sort_bias[..., :num_blocks].to(full)
            # What a block of keys says about where it belongs: (B, H, keys, queries), so transposed.
            logits = (pooled @ weight + bias).transpose(-1, -2) / self.temperature
            holds_keys = there.flatten(2).any(-1)
            allowed = holds_keys[:, None, :, None] & holds_keys[:, None, None, :]
            if causal:
                allowed = allowed & allowed.new_ones(num_blocks, num_blocks).tril(-1)
            return log_sinkhorn(logits, allowed, iterations=self.iterations, causal=causal)


register_attention("sinkhorn", SinkhornAttention, "own and matched block (Sparse Sinkhorn attention)")
