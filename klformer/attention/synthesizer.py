"""Synthesizer: attention weights that are learned, without comparing queries with keys.

random             scores = A                      A (H, max_len, max_len) learned
factorised-random  scores = A B^T                  A, B (H, max_len, r) learned
dense              scores_i = W2 relu(W1 q_i)      a small network of the query, its outputs are positions
factorised-dense   scores_ij = a_i(j // n) b_i(j mod n)    two of them with about sqrt(max_len) outputs each

"Synthesizer: Rethinking Self-Attention in Transformer Models" (Tay et al. 2021). Long Range Arena: factorised random,
r = 32, without the dot product. Softmax over the scores; keys are never used, queries by the dense ones only.
Complexity: O(L^2) in time. Memory O(L^2), but for factorised-random, whose scores are never written out
(a mask of L^2 bits is, when it is causal and padded).
Supports: causal, padding, any length up to max_len. Not: other keys than its own sequence's, decoding.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from klformer.attention.base import AttentionMechanism, AttentionSizes, Capabilities
from klformer.attention.registry import register_attention
from klformer.checks import check_choice, check_count
from klformer.ops.precision import full_precision
from klformer.ops.softmax_attention import attend, hide, softmax_weights, visible_keys

VARIANTS = ("factorised-random", "random", "dense", "factorised-dense")


class SynthesizerAttention(AttentionMechanism):
    """Synthesised attention weights.

    Args:
        max_len: Longest sequence.
        variant: One of the four above.
        rank: Rank r of factorised-random.
    """

    supports_cross = False
    supports_decoding = False
    cost = "L^2"
    needs_max_len = True
    uses_keys = False

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        variant: Literal["factorised-random", "random", "dense", "factorised-dense"] = "factorised-random",
        rank: int = 32,
    ) -> None:
        super().__init__(sizes)
        check_choice("variant", variant, VARIANTS)
        check_count("rank", rank)
        max_len = sizes.known_max_len()
        self.variant = variant
        self.uses_queries = self.capabilities(variant=variant).uses_queries
        self.scores: nn.Module
        if variant == "random":
            self.scores = PositionScores(sizes.num_heads, max_len)
        elif variant == "factorised-random":
            self.scores = FactorisedPositionScores(sizes.num_heads, max_len, rank)
        elif variant == "dense":
            self.scores = QueryScores(sizes.num_heads, sizes.head_dim, max_len)
        else:
            self.scores = FactorisedQueryScores(sizes.num_heads, sizes.head_dim, max_len)

    @classmethod
    def capabilities(cls, **options: Any) -> Capabilities:
        return replace(super().capabilities(), uses_queries=options.get("variant", "").endswith("dense"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        v = hide(v, key_mask)
        if isinstance(self.scores, FactorisedPositionScores):
            left, right = self.scores(v)
            visible = None if key_mask is None else visible_keys(key_mask, left, right, causal=causal)
            return attend(left, right, v, visible, causal=causal, scale=1.0)
        visible = visible_keys(key_mask, v, v, causal=causal)
        with full_precision(v) as full:
            scores = self.scores(q.to(full))
            if visible is None:
                visible = torch.ones_like(scores, dtype=torch.bool)
            weights, _ = softmax_weights(scores, visible)
            return (weights @ v.to(full)).to(v.dtype)


class PositionScores(nn.Module):
    """(H, max_len, max_len), the same for every sequence."""

    def __init__(self, num_heads: int, max_len: int) -> None:
        super().__init__()
        self.table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_heads, max_len, max_len)))

    def forward(self, q: Tensor) -> Tensor:
        length = q.shape[2]
        return self.table[:, :length, :length].to(q.dtype)


class FactorisedPositionScores(nn.Module):
    """Two factors (H, max_len, r), as if they were queries and keys."""

    def __init__(self, num_heads: int, max_len: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_heads, max_len, rank)))
        self.right = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_heads, max_len, rank)))

    def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
        batch, _, length, _ = v.shape
        left, right = (x[None, :, :length].to(v.dtype).expand(batch, -1, -1, -1) for x in (self.left, self.right))
        return left, right


class QueryScores(nn.Module):
    """A network of one hidden layer a head: query (D) -> one output a position."""

    def __init__(self, num_heads: int, head_dim: int, outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_heads, head_dim, head_dim)))
        self.hidden_bias = nn.Parameter(torch.zeros(num_heads, 1, head_dim))
        self.out = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_heads, head_dim, outputs)))
        self.out_bias = nn.Parameter(torch.zeros(num_heads, 1, outputs))

    def forward(self, q: Tensor) -> Tensor:
        return self.of(q, q.shape[2])

    def of(self, q: Tensor, outputs: int) -> Tensor:
        """(B, H, L, D) -> the first `outputs` scores of every query."""
        hidden = (q @ self.hidden.to(q.dtype) + self.hidden_bias.to(q.dtype)).relu()
        return hidden @ self.out[..., :outputs].to(q.dtype) + self.out_bias[..., :outputs].to(q.dtype)


class FactorisedQueryScores(nn.Module):
    """Two networks with about sqrt(max_len) outputs each; the score of a position is a product of one of each."""

    def __init__(self, num_heads: int, head_dim: int, max_len: int) -> None:
        super().__init__()
        self.inner_size = max(1, round(max_len**0.5))
        self.outer_size = -(-max_len // self.inner_size)
        self.outer = QueryScores(num_heads, head_dim, self.outer_size)
        self.inner = QueryScores(num_heads, head_dim, self.inner_size)

    def forward(self, q: Tensor) -> Tensor:
        length = q.shape[2]
        outer = self.outer.of(q, self.outer_size).repeat_interleave(self.inner_size, dim=-1)[..., :length]
        inner = self.inner.of(q, self.inner_size).repeat(1, 1, 1, self.outer_size)[..., :length]
        return outer * inner


register_attention(
    "synthesizer", SynthesizerAttention, "learned attention weights without queries and keys (Synthesizer)"
)
