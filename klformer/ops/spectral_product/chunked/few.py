"""Bidirectional product for one query or a few: the kernel of every pair, and no state.

    out_i = sum_j W_ij v_j / sum_j W_ij        W_ij = exp(b_j) kappa(q_i, k_j), an ordinary (L, S) matrix

A state costs R E a key, and again three times that in backward; a query costs R a key. A classifier that looks at CLS
has one query in its last layer. For one query the kernel needs one transcendental function of each projection, not two:

    prf   log kappa = log sum_r exp(a_r + omega_r.q + omega_r.k)       its slope is a softmax
    rks   kappa = sum_r exp(a_r) cos(omega_r.k - omega_r.q)            its slope is a sine

Each query is stabilised by itself, so that nothing can underflow. A simplex envelope is the log-sum of one more query,
0. Forward keeps the sums over r, (L, S); backward makes the slopes.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.plain import angle, reciprocal, weights_of_keys
from klformer.ops.spectral_product.chunked.positive import LOG2_E, log2_bias
from klformer.ops.spectral_product.chunked.tiling import Cut, Scratch, Tile, chunk_bounds, tiles, with_column
from klformer.ops.spectral_product.operands import FLOOR, SpectralOperands

#: A query costs about as much as so many values in a state, and the features of a state as much as so many more. At 16
#: and 64 values this way was faster up to 1 and 2 queries with prf, up to 2 and 5 with rks (docs/efficiency.md).
VALUES_PER_QUERY = {"prf": 24, "rks": 16}
VALUES_FOR_FEATURES = {"prf": 0, "rks": 16}


def serves(operands: SpectralOperands) -> bool:
    """Whether there are so few queries that this is the faster way."""
    per_query = VALUES_PER_QUERY.get(operands.feature_map.name)
    if per_query is None or operands.causal or operands.q.shape[2] == 0:
        return False
    num_sums = operands.q.shape[2] + operands.kernel.simplex
    values = operands.v.shape[-1] + VALUES_FOR_FEATURES[operands.feature_map.name]
    return operands.q.shape[2] == 1 or num_sums * per_query <= values


@dataclass
class Residuals:
    """The result, and what backward needs besides the operands. Rows are (batch, head) pairs, B * H of them."""

    out: Tensor  # (B, H, L, E)
    sums: Tensor  # (B * H, L, S) over the frequencies; with a simplex envelope one more, last

    @staticmethod
    def empty(operands: SpectralOperands) -> "Residuals":
        batch, heads, length, _ = operands.q.shape
        num_sums = length + operands.kernel.simplex

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=operands.q.device)

        return Residuals(
            out=empty(batch, heads, length, operands.v.shape[-1], dtype=operands.v.dtype),
            sums=empty(batch * heads, num_sums, operands.k.shape[2], dtype=operands.dtype),
        )

    def as_list(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def empty(operands: SpectralOperands) -> list[Tensor]:
    """Room for what `forward` gives."""
    return Residuals.empty(operands).as_list()


def forward(operands: SpectralOperands, cut: Cut) -> list[Tensor]:
    """The result, and what backward needs."""
    saved = Residuals.empty(operands)
    for tile in tiles(operands, cut.rows):
        pairs, sums = _pairs(tile, cut.chunk), saved.sums[tile.rows]
        for start, stop in chunk_bounds(operands.k.shape[2], cut.chunk):
            for index, scores in pairs.scores(tile.keys(start, stop)):
                sums[:, index, start:stop] = pairs.sum_of(scores)
        weights = pairs.weights(sums)
        out = tile.new_zeros(operands.q.shape[2], operands.v.shape[-1])
        for start, stop in chunk_bounds(operands.k.shape[2], cut.chunk):
            out.baddbmm_(weights[..., start:stop], tile.values(start, stop))
        saved.out.flatten(0, 1)[tile.rows] = out
    return saved.as_list()


def backward(
    operands: SpectralOperands, saved_list: list[Tensor], d_out: Tensor, needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Gradients of the operands that are needed."""
    gradients, saved = Gradients(operands, needed), Residuals(*saved_list)
    length, num_keys = operands.q.shape[2], operands.k.shape[2]
    for tile in tiles(operands, cut.rows):
        collect, pairs, sums = TileGradients(tile, gradients), _pairs(tile, cut.chunk), saved.sums[tile.rows]
        d_rows, weights = tile.chunk(d_out, 0, length), pairs.weights(sums)
        average = (d_rows * tile.chunk(saved.out, 0, length)).sum(-1, keepdim=True)
        d_weights = torch.empty_like(weights)  # of weights before they are divided by their sum, times that sum
        for start, stop in chunk_bounds(num_keys, cut.chunk):
            collect.store("v", start, stop, weights[..., start:stop].transpose(1, 2), d_rows)
            torch.sub(
                torch.bmm(d_rows, tile.values(start, stop).transpose(1, 2)), average, out=d_weights[..., start:stop]
            )
        d_sums, d_key_angle = pairs.weights_vjp(collect, sums, weights, d_weights)
        d_shifts = tile.new_zeros(sums.shape[1], operands.num_projections)
        for start, stop in chunk_bounds(num_keys, cut.chunk):
            keys, d_scores = tile.keys(start, stop), None
            less = sums[..., start:stop] if operands.feature_map.exponential else None
            for index, scores in pairs.scores(keys, less):
                d_one = pairs.slope(collect, scores, d_sums[:, index, start:stop].unsqueeze(-1))
                d_shifts[:, index] += d_one.sum(1)
                if d_scores is None:
                    d_scores = d_one if sums.shape[1] == 1 else d_one.clone()
                else:
                    d_scores += d_one
            assert d_scores is not None
            assert tile.omega is not None
            if d_key_angle is None or tile.pair_offset is None:
                collect.store("k", start, stop, d_scores, tile.omega)
            else:
                d_angle = d_key_angle[:, start:stop]
                collect.write("k", start, stop, torch.bmm(d_scores, tile.omega).baddbmm_(d_angle, tile.pair_offset))
                if collect.pair_offset is not None:
                    collect.pair_offset.baddbmm_(d_angle.transpose(1, 2), keys)
            if collect.omega is not None:
                collect.omega.baddbmm_(d_scores.transpose(1, 2), keys)
        pairs.store_queries(collect, d_shifts[:, :length])
        collect.finish()
    return gradients.by_name


def _pairs(tile: Tile, chunk: int) -> "_Pairs":
    return _PositivePairs(tile, chunk) if tile.feature_map.exponential else _CosinePairs(tile, chunk)


class _Pairs(ABC):
    """Scores of pairs of a tile: what a key's projections are shifted by for each query."""

    def __init__(self, tile: Tile, chunk: int, unit: float) -> None:
        assert tile.omega is not None
        self.tile = tile
        self.queries = tile.queries(0, tile.operands.q.shape[2])
        self._omega = tile.omega * unit
        self._scratch = [Scratch(tile, chunk, tile.omega.shape[1], use) for use in ("scores", "spare")]
        self._shifts = self.shifts()
        #: Frequencies and, as one more column, the shifts of the only query.
        self._columns = with_column(self._omega, self._shifts.transpose(1, 2)) if self._shifts.shape[1] == 1 else None

    @abstractmethod
    def shifts(self) -> Tensor:
        """(n, L, R) of the queries; with a simplex envelope one more, last."""

    def scores(self, keys: Tensor, less: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Index and scores (n, chunk, R) of each query with the keys (n, chunk, D), less what is given for each pair
        (n, L, chunk); to be used before the next."""
        plain, shifted = (scratch.tokens_first(keys.shape[1]) for scratch in self._scratch)
        if self._columns is not None:
            left, right = with_column(keys, 1.0, use="tokens"), self._columns
            if less is not None:
                left, right = with_column(keys, 1.0, -less.transpose(1, 2), use="tokens"), with_column(right, 1.0)
            yield 0, torch.bmm(left, right.transpose(1, 2), out=plain)
            return
        torch.bmm(keys, self._omega.transpose(1, 2), out=plain)
        for index in range(self._shifts.shape[1]):
            scores = torch.add(plain, self._shifts[:, index : index + 1], out=shifted)
            yield index, scores if less is None else scores.sub_(less[:, index].unsqueeze(-1))

    @abstractmethod
    def sum_of(self, scores: Tensor) -> Tensor:
        """The sum over the frequencies, (n, chunk). Overwrites the scores."""

    @abstractmethod
    def weights(self, sums: Tensor) -> Tensor:
        """The weights of keys (n, L, S), that sum to one for every query that has a key."""

    @abstractmethod
    def weights_vjp(
        self, collect: TileGradients, sums: Tensor, weights: Tensor, d_weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the sums (n, L, S) and of the keys' angles (n, S, 1), given the gradient of weights that are yet
        to be divided by their sum, times that sum."""

    @abstractmethod
    def slope(self, collect: TileGradients, scores: Tensor, d_sums: Tensor) -> Tensor:
        """The gradient of the scores (n, chunk, R), which are overwritten, given d_sums (n, chunk, 1). Scores whose
        sum is a logarithm are given less that."""

    def store_queries(self, collect: TileGradients, d_shifts: Tensor) -> None:
        """Write the gradient of the queries, given that of the shifts (n, L, R)."""
        assert self.tile.omega is not None
        collect.store("q", 0, self.queries.shape[1], d_shifts, self.tile.omega)
        if collect.omega is not None:
            collect.omega.baddbmm_(d_shifts.transpose(1, 2), self.queries)


class _PositivePairs(_Pairs):
    """Sums are logarithms to base 2."""

    def __init__(self, tile: Tile, chunk: int) -> None:
        super().__init__(tile, chunk, LOG2_E)

    def shifts(self) -> Tensor:
        shifts = torch.bmm(self.queries, self._omega.transpose(1, 2))
        if self.tile.frequency_bias is not None:
            shifts += self.tile.frequency_bias * LOG2_E
        if not self.tile.operands.kernel.simplex:
            return shifts
        return torch.cat([shifts, self.tile.new_zeros(1, shifts.shape[2])], dim=1)

    def sum_of(self, scores: Tensor) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        return scores.sub_(largest).exp2_().sum(-1).log2_().add_(largest.squeeze(-1))

    def weights(self, sums: Tensor) -> Tensor:
        logs, bias = sums, log2_bias(self.tile)
        if self.tile.operands.kernel.simplex:
            logs = logs[:, :-1] - logs[:, -1:]
        if bias is not None:
            logs = logs + bias.transpose(1, 2)
        if not logs.shape[2]:
            return logs
        largest = logs.amax(-1, keepdim=True)
        weights = (logs - largest.masked_fill(largest == -torch.inf, 0)).exp2_()
        return weights.mul_(reciprocal(weights.sum(-1, keepdim=True)))

    def weights_vjp(
        self, collect: TileGradients, sums: Tensor, weights: Tensor, d_weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        d_sums = d_weights.mul_(weights)
        d_bias = d_sums.sum(1, keepdim=True)
        if collect.key_bias is not None:
            collect.key_bias.copy_(d_bias.transpose(1, 2))
        return torch.cat([d_sums, -d_bias], dim=1) if self.tile.operands.kernel.simplex else d_sums, None

    def slope(self, collect: TileGradients, scores: Tensor, d_sums: Tensor) -> Tensor:
        return scores.exp2_().mul_(d_sums)

    def store_queries(self, collect: TileGradients, d_shifts: Tensor) -> None:
        super().store_queries(collect, d_shifts)
        if collect.frequency_bias is not None:
            collect.frequency_bias += d_shifts.sum(1, keepdim=True)


class _CosinePairs(_Pairs):
    """Sums are of cosines; a pair offset multiplies them by one more, and the smoothing is added."""

    def __init__(self, tile: Tile, chunk: int) -> None:
        assert tile.omega is not None
        super().__init__(tile, chunk, 1.0)
        self._frequency_weights = None if tile.frequency_bias is None else tile.frequency_bias.exp()
        self._key_weights = weights_of_keys(tile)  # (n, 1, S)
        self._angle = self._angle_differences()  # (n, L, S)

    def _angle_differences(self) -> Tensor | None:
        query_angle = angle(self.tile, self.queries)
        if query_angle is None:
            return None
        key_angle = angle(self.tile, self.tile.keys(0, self.tile.operands.k.shape[2]))
        assert key_angle is not None
        return query_angle.transpose(1, 2) - key_angle

    def shifts(self) -> Tensor:
        return torch.bmm(self.queries, self._omega.transpose(1, 2)).neg_()

    def sum_of(self, scores: Tensor) -> Tensor:
        cosines = scores.cos_()
        return (cosines if self._frequency_weights is None else cosines.mul_(self._frequency_weights)).sum(-1)

    def _raw_weights(self, sums: Tensor) -> Tensor:
        """(n, L, S), not divided by their sum."""
        kernel = sums if self._angle is None else sums * self._angle.cos()
        if self.tile.smoothing is not None:
            kernel = kernel + self.tile.smoothing
        if self._key_weights is not None:
            kernel = kernel * self._key_weights
        return kernel

    def weights(self, sums: Tensor) -> Tensor:
        raw = self._raw_weights(sums)
        if self.tile.smoothing is not None:
            raw = self._raised(raw, self.tile.smoothing)
        self._inverse = reciprocal(raw.sum(-1, keepdim=True))
        return raw * self._inverse

    def _raised(self, raw: Tensor, smoothing: Tensor) -> Tensor:
        """As in `floor`, where the whole kernel is there."""
        keys = raw.new_ones(1, 1, raw.shape[2]) if self._key_weights is None else self._key_weights
        self._weight = keys.sum(-1, keepdim=True)  # (n or 1, 1, 1)
        per_weight = reciprocal(self._weight)
        self._shares = keys * per_weight  # (n or 1, 1, S)
        missing = (FLOOR * smoothing - raw.sum(-1, keepdim=True) * per_weight).clamp_(min=0)  # (n, L, 1)
        self._below = missing > 0
        return torch.addcmul(raw, missing, keys)

    def weights_vjp(
        self, collect: TileGradients, sums: Tensor, weights: Tensor, d_weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if self.tile.smoothing is not None:
            d_mean = (d_weights * self._shares).sum(-1, keepdim=True) * self._below  # (n, L, 1)
            d_weights -= d_mean
            if collect.smoothing is not None:
                collect.smoothing += FLOOR * (d_mean * self._inverse).sum(1, keepdim=True) * self._weight
        if collect.key_bias is not None:
            d_bias = d_weights * weights
            if self.tile.smoothing is not None:
                d_bias += d_mean * self._shares
            collect.key_bias.copy_(d_bias.sum(1).unsqueeze(-1))
        d_kernel = d_weights.mul_(self._inverse)
        if self._key_weights is not None:
            d_kernel *= self._key_weights
        if collect.smoothing is not None:
            collect.smoothing += d_kernel.sum((1, 2), keepdim=True)
        if self._angle is None:
            return d_kernel, None
        d_angle = (d_kernel * sums).mul_(self._angle.sin()).neg_()
        self._d_query_angle = d_angle.sum(2, keepdim=True)  # (n, L, 1)
        return d_kernel.mul_(self._angle.cos()), -d_angle.sum(1).unsqueeze(-1)

    def slope(self, collect: TileGradients, scores: Tensor, d_sums: Tensor) -> Tensor:
        if collect.frequency_bias is not None:
            cosines = scores.cos().mul_(d_sums).sum(1, keepdim=True)
            collect.frequency_bias += cosines if self._frequency_weights is None else cosines * self._frequency_weights
        d_scores = scores.sin_().mul_(-d_sums)
        return d_scores if self._frequency_weights is None else d_scores.mul_(self._frequency_weights)

    def store_queries(self, collect: TileGradients, d_shifts: Tensor) -> None:
        super().store_queries(collect, d_shifts.neg_())
        if self.tile.omega is None or self.tile.pair_offset is None:
            return
        d_queries = torch.bmm(d_shifts, self.tile.omega).baddbmm_(self._d_query_angle, self.tile.pair_offset)
        collect.write("q", 0, self.queries.shape[1], d_queries)
        if collect.pair_offset is not None:
            collect.pair_offset.baddbmm_(self._d_query_angle.transpose(1, 2), self.queries)
