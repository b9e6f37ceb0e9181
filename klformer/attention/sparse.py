"""Sparse Transformer: a block of neighbours, and a thin net over all of the sequence.

fixed:    i sees j if  j is in the block of i,  or  j is one of the last c tokens of its own block ("summaries")
strided:  i sees j if  |i - j| < b,             or  (i - j) mod b = 0

"Generating Long Sequences with Sparse Transformers" (Child et al. 2019), one head attending to the union of both parts.
Long Range Arena: fixed, blocks of 50, c = 10, causal even in an encoder; here causal or not as asked for. Its code also
keeps the first column of every block.
Complexity: O(L (b + c L/b)) fixed, O(L (b + L/b)) strided, in time: as in the paper, L^1.5 when b is about sqrt(L), and
quadratic with a small factor when b is kept. Memory is linear: scores are computed in pieces, and again for backward.
Supports: causal, padding, any length. Not: other keys than its own sequence's, decoding step by step.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import register_attention
from klformer.checks import check_choice, check_count
from klformer.errors import ArgumentError
from klformer.ops.blocks import block_positions, cut, cut_mask, join, neighbours
from klformer.ops.precision import full_precision
from klformer.ops.softmax_attention import hide, softmax_weights
from klformer.ops.transforms import recomputed

PATTERNS = ("fixed", "strided")
#: Scores computed at once, over batch, heads, queries and keys.
SCORES_AT_ONCE = 2**20


class SparseAttention(AttentionMechanism):
    """Union of neighbours and a thin net.

    Args:
        block_size: Tokens b of a block; with "strided", the stride.
        num_summary: Tokens c at the end of every block that all see; "fixed" only.
        pattern: "fixed" or "strided".
    """

    supports_cross = False
    supports_decoding = False
    cost = "L^2 c/b"

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        block_size: int = 50,
        num_summary: int = 10,
        pattern: Literal["fixed", "strided"] = "fixed",
    ) -> None:
        super().__init__(sizes)
        check_count("block_size", block_size)
        check_count("num_summary", num_summary)
        check_choice("pattern", pattern, PATTERNS)
        if num_summary > block_size:
            raise ArgumentError(f"num_summary must be at most block_size={block_size}, got {num_summary}")
        self.block_size = block_size
        self.num_summary = num_summary
        self.pattern = pattern

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        length, size = q.shape[2], self.block_size
        if q.numel() == 0:
            return v * 0
        k, v = hide(k, key_mask), hide(v, key_mask)
        queries, keys, values = cut(q, size), cut(k, size), cut(v, size)
        there = cut_mask(key_mask, k, size)
        before, after = (0, 0) if self.pattern == "fixed" else (1, 0 if causal else 1)
        near = tuple(neighbours(x, before, after, dim=3) for x in (keys, values))
        near_there = neighbours(there, before, after, dim=4)
        far: FixedFar | StridedFar
        if self.pattern == "fixed":
            start = size - self.num_summary
            far = FixedFar(keys[..., start:, :], values[..., start:, :], there[..., start:], size)
        else:
            far = StridedFar(keys, values, there)

        def attend_rows(first: int, queries: Tensor, near_k: Tensor, near_v: Tensor, near_there: Tensor) -> Tensor:
            """The results of some blocks, of which `first` is the first."""
            rows = queries.shape[1]
            i = first * size + block_positions(rows, size, device=q.device).transpose(-1, -2)
            j = first * size + block_positions(rows, size, before=before, after=after, device=q.device)
            near_visible = near_there & ((j - i).abs() < size)
            if causal:
                near_visible = near_visible & (j <= i)
            near_scores = queries @ near_k.transpose(-1, -2)
            far_scores = far.scores(queries)
            far_visible = far.visible(i, causal)
            shape = near_scores.shape[:-1]
            weights, _ = softmax_weights(
                torch.cat([near_scores, far_scores], dim=-1) * q.shape[-1] ** -0.5,
                torch.cat([near_visible.expand(*shape, -1), far_visible.expand(*shape, -1)], dim=-1),
            )
            num_near = near_scores.shape[-1]
            near_weights, far_weights = weights[..., :num_near], weights[..., num_near:]
            return near_weights @ near_v + far.weighted_sum(far_weights)

        with full_precision(q) as full:
            far = far.to(full)
            scores_a_block = q.shape[0] * self.num_heads * size * (near[0].shape[3] + far.num_keys)
            step = max(1, SCORES_AT_ONCE // scores_a_block)
            # Split and not sliced: the gradient of every slice would be as large as the whole.
            operands = [torch.split(x.to(full), step, dim=1) for x in (queries, *near)]
            operands.append(torch.split(near_there, step, dim=1))
            pieces = [
                recomputed(attend_rows, number * step, *piece, preserve_rng_state=False)
                for number, piece in enumerate(zip(*operands, strict=True))
            ]
            out = join(torch.cat(pieces, dim=1), length)
        return out.to(q.dtype)


@dataclass(frozen=True)
class FixedFar:
    """The summaries at the end of every block, (B, N, H, c, D): seen by all other blocks."""

    keys: Tensor
    values: Tensor
    there: Tensor
    block_size: int

    @property
    def num_keys(self) -> int:
        """Summaries M = N c."""
        return self.keys.shape[1] * self.keys.shape[3]

    def to(self, dtype: torch.dtype) -> "FixedFar":
        return FixedFar(self.keys.to(dtype), self.values.to(dtype), self.there, self.block_size)

    def scores(self, queries: Tensor) -> Tensor:
        """(B, n, H, b, D) -> (B, n, H, b, M)."""
        keys = self.keys.transpose(1, 2).flatten(2, 3)
        return _rows(_flat(queries) @ keys.transpose(-1, -2), queries.shape[1])

    def visible(self, i: Tensor, causal: bool) -> Tensor:
        """(1|B, n, 1, b, M) for queries at the positions i (1, n, 1, b, 1)."""
        num_blocks, count = self.keys.shape[1], self.keys.shape[3]
        starts = torch.arange(num_blocks, device=i.device) * self.block_size
        j = (starts[:, None] + torch.arange(self.block_size - count, self.block_size, device=i.device)).flatten()
        elsewhere = j // self.block_size != i // self.block_size
        there = self.there.transpose(1, 3).reshape(self.there.shape[0], 1, 1, 1, -1)
        return there & elsewhere & (j <= i) if causal else there & elsewhere

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(B, n, H, b, M) -> (B, n, H, b, E)."""
        values = self.values.transpose(1, 2).flatten(2, 3)
        return _rows(_flat(weights) @ values, weights.shape[1])


@dataclass(frozen=True)
class StridedFar:
    """Tokens at a distance that is a multiple of the block: the same place in the other blocks, (B, N, H, b, D)."""

    keys: Tensor
    values: Tensor
    there: Tensor

    @property
    def num_keys(self) -> int:
        return self.keys.shape[1]

    def to(self, dtype: torch.dtype) -> "StridedFar":
        return StridedFar(self.keys.to(dtype), self.values.to(dtype), self.there)

    def scores(self, queries: Tensor) -> Tensor:
        """(B, n, H, b, D) -> (B, n, H, b, N)."""
        return torch.einsum("bnhrd,bmhrd->bnhrm", queries, self.keys)

    def visible(self, i: Tensor, causal: bool) -> Tensor:
        """(1|B, n, 1, b, N) for queries at the positions i (1, n, 1, b, 1)."""
        num_blocks, size = self.keys.shape[1], self.keys.shape[3]
        other = torch.arange(num_blocks, device=i.device)
        own = i // size
        there = self.there[:, :, 0, 0].transpose(1, 2)[:, None, None]
        return there & (other < own) if causal else there & (other != own)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(B, n, H, b, N) -> (B, n, H, b, E)."""
        return torch.einsum("bnhrm,bmhre->bnhre", weights, self.values)


def _flat(blocks: Tensor) -> Tensor:
    """(B, n, H, b, D) -> (B, H, n b, D)."""
    return blocks.transpose(1, 2).flatten(2, 3)


def _rows(x: Tensor, num_blocks: int) -> Tensor:
    """(B, H, n b, D) -> (B, n, H, b, D)."""
    return x.view(*x.shape[:2], num_blocks, -1, x.shape[-1]).transpose(1, 2)


register_attention("sparse", SparseAttention, "neighbours and a thin net over the sequence (Sparse Transformer)")
