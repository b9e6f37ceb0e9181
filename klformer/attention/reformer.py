"""Reformer: tokens see those that hash alike.

    h(x) = argmax [x W, -x W]                            angular hash into `num_buckets`, W random
    i sees j if h(q_i) = h(q_j), and j is in the chunk of i within the bucket or in the one before it
    scores q_i.k_j with k_j = q_j / |q_j|                one projection for queries and keys

A token sees itself only if it sees no other. Several rounds of hashing are one attention over the union of what they
see.

"Reformer: The Efficient Transformer" (Kitaev et al. 2020), with one thing done otherwise: every bucket starts a chunk
of its own, in order of position. In the original, chunks run on over the end of a bucket, so that their borders, and
with them what a token sees, depend on all other tokens: on padding and, in a causal model, on the future.

Long Range Arena is set to 10 buckets, "chunks of 10" and one round, the defaults here. Its code makes ten chunks of a
tenth of the sequence of that, does not look at the buckets, lets a token see itself and does not normalise the keys.
Complexity: O(L log L) for sorting and O(L c) for attention with chunks of c tokens, each times the rounds, in time;
memory O(L c).
Supports: causal, padding, any length. Not: other keys than its own sequence's, decoding step by step. The keys that
are given are not used, and a layer makes no projection for them. W is noise that `klformer.resample` draws again; it
is saved.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import register_attention
from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.kernels.coupling import draw_normal
from klformer.noise import Resampled
from klformer.ops.precision import full_precision
from klformer.ops.softmax_attention import hide, merge, softmax_weights


class ReformerAttention(AttentionMechanism, Resampled):
    """Attention inside buckets of a locality-sensitive hash.

    Args:
        num_buckets: Buckets of a round; even, or 1 for all tokens in one.
        chunk_size: Tokens of a chunk.
        num_rounds: Independent hashes.
    """

    supports_cross = False
    supports_decoding = False
    cost = "L log L"
    uses_keys = False

    rotations: Tensor

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        num_buckets: int = 10,
        chunk_size: int = 10,
        num_rounds: int = 1,
    ) -> None:
        super().__init__(sizes)
        check_count("num_buckets", num_buckets)
        check_count("chunk_size", chunk_size)
        check_count("num_rounds", num_rounds)
        if num_buckets > 1 and num_buckets % 2:
            raise ArgumentError(f"num_buckets must be even (a direction and its opposite) or 1, got {num_buckets}")
        self.num_buckets = num_buckets
        self.chunk_size = chunk_size
        self.num_rounds = num_rounds
        self.register_buffer("rotations", torch.empty(num_rounds, sizes.num_heads, sizes.head_dim, num_buckets // 2))
        self.resample()

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw new directions to hash by."""
        draw_normal(self.rotations, generator)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        if q.numel() == 0:
            return v * 0
        with full_precision(q) as full:
            x, values = hide(q, key_mask).to(full), hide(v, key_mask).to(full)
            keys = unit_vectors(x)
            there = None if key_mask is None else key_mask[:, None].expand(x.shape[:3])
            rounds = [self._place(x, there, rotations.to(full)) for rotations in self.rotations]
            seen = [_see(places, causal) for places in rounds]
            sees_others = torch.stack([pairs.sees_others(places) for pairs, places in zip(seen, rounds, strict=True)])
            parts, normalisers = [], []
            for pairs, places in zip(seen, rounds, strict=True):
                scores = _take(x, pairs.i) @ _take(keys, pairs.j).transpose(-1, -2)
                if len(rounds) > 1:
                    scores = scores - pairs.times_seen(rounds).to(full).log()
                weights, normaliser = softmax_weights(scores, pairs.visible(sees_others.any(0)))
                out = weights @ _take(values, pairs.j)
                parts.append(_take(out.flatten(2, 3), places.slot))
                normalisers.append(normaliser.flatten(2).gather(2, places.slot))
            return merge(torch.stack(parts), torch.stack(normalisers)).to(v.dtype)

    def hash(self, x: Tensor, rotations: Tensor) -> Tensor:
        """(B, H, L, D) by (H, D, buckets / 2) -> buckets (B, H, L)."""
        if self.num_buckets == 1:
            return x.new_zeros(x.shape[:3], dtype=torch.long)
        projected = x.detach() @ rotations
        return torch.cat([projected, -projected], dim=-1).argmax(-1)

    def _place(self, x: Tensor, there: Tensor | None, rotations: Tensor) -> "Places":
        """Where a round puts every token: in its bucket, in order of position; padding nowhere near the others."""
        size, length = self.chunk_size, x.shape[2]
        bucket = self.hash(x, rotations)
        if there is not None:
            bucket = bucket.masked_fill(~there, self.num_buckets)
        order = bucket.argsort(dim=-1, stable=True)
        counts = torch.nn.functional.one_hot(bucket, self.num_buckets + 1).sum(2)
        chunks = -(-counts // size)
        first_token, first_chunk = counts.cumsum(-1) - counts, chunks.cumsum(-1) - chunks
        # The rank in the bucket is the place in the order, less where the bucket starts.
        position = torch.arange(length, device=x.device).expand_as(order)
        rank = torch.empty_like(order).scatter(-1, order, position) - first_token.gather(-1, bucket)
        slot = first_chunk.gather(-1, bucket) * size + rank
        num_slots = (length // size + self.num_buckets + 1) * size
        token = torch.full((*slot.shape[:2], num_slots), -1, device=x.device).scatter(-1, slot, position)
        kept = bucket < self.num_buckets
        return Places(bucket, rank // size, slot, token.view(*slot.shape[:2], -1, size), kept)


def unit_vectors(x: Tensor) -> Tensor:
    """x / |x|, with a bounded gradient where x is 0."""
    mean_square = x.square().mean(-1, keepdim=True)
    return x * (mean_square + 1e-6).rsqrt() * x.shape[-1] ** -0.5


@dataclass(frozen=True)
class Places:
    """What one round of hashing makes of the tokens; (B, H, L) but for `token`."""

    bucket: Tensor
    #: Chunk inside the bucket.
    chunk: Tensor
    #: Place among all slots.
    slot: Tensor
    #: (B, H, chunks, c): the token in every slot, -1 in an empty one.
    token: Tensor
    #: Not padding.
    kept: Tensor


@dataclass(frozen=True)
class Pairs:
    """Queries i (B, H, chunks, c), the keys j (B, H, chunks, 2c) beside them, and who sees whom but for itself."""

    i: Tensor
    j: Tensor
    same_bucket: Tensor

    def sees_others(self, places: Places) -> Tensor:
        """(B, H, L): whether a token sees another."""
        return (self.same_bucket & ~self.is_self).any(-1).flatten(2).gather(2, places.slot)

    def visible(self, sees_others: Tensor) -> Tensor:
        """(B, H, chunks, c, 2c): the others, and itself only where there are none in any round."""
        return self.same_bucket & ~(self.is_self & _of(sees_others, self.i).unsqueeze(-1))

    def times_seen(self, rounds: list[Places]) -> Tensor:
        """In how many rounds each pair sees each other; a key that several rounds see is to count once."""
        times = torch.zeros_like(self.same_bucket, dtype=torch.long)
        for places in rounds:
            same = _of(places.bucket, self.i).unsqueeze(-1) == _of(places.bucket, self.j).unsqueeze(-2)
            chunks_back = _of(places.chunk, self.i).unsqueeze(-1) - _of(places.chunk, self.j).unsqueeze(-2)
            times = times + (same & (chunks_back >= 0) & (chunks_back <= 1))
        return times.clamp(min=1)

    @property
    def is_self(self) -> Tensor:
        return self.i.unsqueeze(-1) == self.j.unsqueeze(-2)


def _see(places: Places, causal: bool) -> Pairs:
    """Every chunk with the chunk before it."""
    token = places.token
    seen = torch.cat([pad(token, (0, 0, 1, 0), value=-1)[:, :, :-1], token], dim=-1)
    i, j = token.clamp(min=0), seen.clamp(min=0)
    visible = (token >= 0).unsqueeze(-1) & ((seen >= 0) & _of(places.kept, j)).unsqueeze(-2)
    visible = visible & (_of(places.bucket, i).unsqueeze(-1) == _of(places.bucket, j).unsqueeze(-2))
    if causal:
        visible = visible & (j.unsqueeze(-2) <= i.unsqueeze(-1))
    return Pairs(i, j, visible)


def _of(per_token: Tensor, index: Tensor) -> Tensor:
    """(B, H, L) at (B, H, chunks, n)."""
    return per_token.gather(2, index.flatten(2)).view(index.shape)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of (B, H, L, D) at (B, H, ...) -> (B, H, ..., D)."""
    batch, heads, length, width = x.shape
    first = torch.arange(batch * heads, device=x.device).view(batch, heads, *[1] * (index.dim() - 2)) * length
    rows = x.reshape(-1, width).index_select(0, (first + index).flatten())
    return rows.view(*index.shape, width)


register_attention("reformer", ReformerAttention, "attention among tokens that hash alike (Reformer)")
