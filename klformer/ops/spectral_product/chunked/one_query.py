"""The product of one query: the kernel of every pair, and no state.

    out = sum_j W_j v_j / sum_j W_j        W_j = exp(b_j) kappa(q, k_j), a row of S numbers

A state costs R E a key, and again three times that in backward; one query costs R a key. A classifier that looks at CLS
has one query in its last layer. The kernel needs one transcendental function of each projection, not two:

    prf   log kappa = log 1/R sum_r exp(a_r + omega_r.q + omega_r.k)                          its slope is a softmax
    rks   kappa = 1/R sum_r exp(a_r) cos(omega_r.k - omega_r.q) cos(offset.(k - q)) + s       its slope is a sine

Forward keeps the sums over r, (B, H, 1 or 2, S); backward makes the slopes. A simplex envelope is the sum of a second
query, 0.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from klformer.ops.spectral_product.autograd import empty_results
from klformer.ops.spectral_product.chunked.exponential import LN_2, LOG2_E
from klformer.ops.spectral_product.chunked.features import angle, log_of, reciprocal, weights_of_keys
from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.tiles import Cut, Scratch, Tile, chunk_bounds, tiles
from klformer.ops.spectral_product.operands import FLOOR, NO_KEY, Call


def serves(call: Call) -> bool:
    """Return whether a call has one query, and frequencies. In a program that is exported lengths are not known."""
    exporting = torch.compiler.is_exporting()
    return not exporting and call.q is not None and call.q.shape[2] == 1 and call.kernel.omega is not None


def empty_kept(call: Call) -> list[Tensor]:
    """Return room for the sums over frequencies, (B, H, 1, S) or (B, H, 2, S)."""
    shape = (call.batch_size, call.num_heads, 1 + call.kernel.simplex, call.tokens.shape[2])
    return [torch.empty(shape, dtype=call.dtype, device=call.device)]


def forward(call: Call, cut: Cut) -> list[Tensor]:
    """Return the result, its log-sum, and what backward needs."""
    (out, log_sum), (sums,) = empty_results(call), empty_kept(call)
    for tile in tiles(call, cut.rows):
        row = _Row(tile, cut.chunk)
        for start, stop in chunk_bounds(sums.shape[3], cut.chunk):
            keys = tile.keys(start, stop)
            for number in range(sums.shape[2]):
                tile.write(sums[:, :, number, start:stop], row.sums(keys, number))
        weights, logs = row.weights(tile.rows(sums))
        result = tile.new_zeros(1, call.value_dim)
        for start, stop in chunk_bounds(sums.shape[3], cut.chunk):
            result.baddbmm_(weights[..., start:stop], tile.values(start, stop))
        tile.write(out, result)
        tile.write(log_sum, logs.squeeze(1))
    return [out, log_sum, sums]


def backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Return the gradients of the tensors that are needed."""
    gradients, (out, _, sums), (d_out, d_log_sum) = Gradients(call, needed), outputs, d_results
    exact = out.dtype == call.dtype
    for tile in tiles(call, cut.rows):
        collect, row, own = TileGradients(tile, gradients), _Row(tile, cut.chunk), tile.rows(sums)
        weights, _ = row.weights(own)
        d_row = tile.new_zeros(1, call.value_dim) if d_out is None else tile.rows(d_out)
        d_log = tile.new_zeros(1, 1) if d_log_sum is None else tile.rows(d_log_sum).unsqueeze(1)
        d_weights = torch.empty_like(weights)  # of weights that are yet to be divided by their sum, times that sum
        for start, stop in chunk_bounds(sums.shape[3], cut.chunk):
            values = tile.values(start, stop)
            collect.store("v", start, stop, weights[..., start:stop].transpose(1, 2), d_row)
            torch.bmm(d_row, values.transpose(1, 2), out=d_weights[..., start:stop])
        average = (
            (d_row * tile.rows(out)).sum(-1, keepdim=True) if exact else (d_weights * weights).sum(-1, keepdim=True)
        )
        d_sums = row.weights_vjp(collect, own, weights, d_weights.sub_(average).add_(d_log))
        d_query = tile.new_zeros(1, call.num_projections)
        for start, stop in chunk_bounds(sums.shape[3], cut.chunk):
            keys = tile.keys(start, stop)
            d_scores = row.slopes(collect, keys, own, d_sums, 0, start, stop)
            d_query += d_scores.sum(1, keepdim=True)
            if call.kernel.simplex:
                d_scores = d_scores + row.slopes(collect, keys, own, d_sums, 1, start, stop)
            row.store_keys(collect, keys, d_scores, start, stop)
        row.store_query(collect, d_query)
        collect.finish()
    return gradients.by_name


class _Row:
    """The row of a tile's query: scores of its pairs, weights of its keys, and their gradients.

    Sums of exponential maps are logarithms to base 2.
    """

    def __init__(self, tile: Tile, chunk: int) -> None:
        assert tile.omega is not None
        self.tile, self.query, self._exponential = tile, tile.queries(0, 1), tile.feature_map.exponential
        num_frequencies, num_keys = tile.call.num_projections, tile.call.tokens.shape[2]
        self._omega = tile.omega * LOG2_E if self._exponential else tile.omega
        self._scratch = Scratch(tile, chunk, num_frequencies, "scores")
        self._spare = Scratch(tile, chunk, num_frequencies, "spare")
        shift = tile.project(self.query, self._omega, tile.new_zeros(1, num_frequencies))  # (n, 1, R)
        if not self._exponential:
            shift = -shift
        elif tile.frequency_bias is not None:
            shift = shift + tile.frequency_bias * LOG2_E
        self._shift = shift
        keys = tile.keys(0, num_keys)
        query_angle, key_angle = angle(tile, self.query), angle(tile, keys)
        self._angle = None if query_angle is None or key_angle is None else key_angle - query_angle  # (n, 1, S)
        self._log_weights = tile.log_weights(keys, 0, num_keys)
        self._key_weights: Tensor | None = None
        self._largest: Tensor | None = None
        if not self._exponential:
            self._key_weights, self._largest = weights_of_keys(tile)
        self._frequency_weights = None if tile.frequency_bias is None else tile.frequency_bias.exp()

    def _scores(self, keys: Tensor, number: int) -> Tensor:
        """Return the scores (n, chunk, R) of keys with the query, or with the query 0."""
        scores = self.tile.project(keys, self._omega, self._scratch.tokens_first(keys.shape[1]))
        return scores if number else scores.add_(self._shift)

    def sums(self, keys: Tensor, number: int) -> Tensor:
        """Return the sums over the frequencies, (n, chunk)."""
        scores = self._scores(keys, number)
        if self._exponential:
            largest = scores.amax(-1, keepdim=True)
            return scores.sub_(largest).exp2_().sum(-1).log2_().add_(largest.squeeze(-1))
        scores.cos_()
        return (scores if self._frequency_weights is None else scores.mul_(self._frequency_weights)).sum(-1)

    def weights(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of keys (n, 1, S), which sum to one if there is a key, and the log-sum (n, 1, 1)."""
        log_normaliser = self.tile.call.kernel.log_normaliser
        if not sums.shape[2]:
            return sums[:, :1], self.tile.new_zeros(1, 1).fill_(-torch.inf)
        if self._exponential:
            logs = sums[:, :1]
            if self.tile.call.kernel.simplex:
                logs = logs - sums[:, 1:] + math.log2(self.tile.call.num_projections)
            if self._log_weights is not None:
                logs = logs + self._log_weights.transpose(1, 2) * LOG2_E
            largest = logs.amax(-1, keepdim=True).clamp(min=NO_KEY)
            weights = (logs - largest).exp2_()
            self._total = weights.sum(-1, keepdim=True)
            log_sum = log_of(self._total, largest * LN_2, log_normaliser)
            return weights.mul_(reciprocal(self._total)), log_sum
        raw = self._kernel(sums)
        if self.tile.smoothing is not None:
            raw = self._raised(raw, self.tile.smoothing)
        self._total = raw.sum(-1, keepdim=True)
        assert self._largest is not None
        return raw * reciprocal(self._total), log_of(self._total, self._largest, log_normaliser)

    def _kernel(self, sums: Tensor) -> Tensor:
        """Return the kernel of pairs, times R and the weights of keys, before the floor of the smoothing."""
        kernel = sums if self._angle is None else sums * self._angle.cos()
        if self.tile.smoothing is not None:
            kernel = kernel + self.tile.smoothing
        return kernel if self._key_weights is None else kernel * self._key_weights

    def _raised(self, raw: Tensor, smoothing: Tensor) -> Tensor:
        """As in `floor`, where the whole kernel is there."""
        keys = torch.ones_like(raw) if self._key_weights is None else self._key_weights
        self._weight = keys.sum(-1, keepdim=True)  # (n, 1, 1)
        self._shares = keys * reciprocal(self._weight)
        missing = (FLOOR * smoothing - raw.sum(-1, keepdim=True) * reciprocal(self._weight)).clamp_(min=0)
        self._below = missing > 0
        return torch.addcmul(raw, missing, keys)

    def weights_vjp(self, collect: TileGradients, sums: Tensor, weights: Tensor, d_weights: Tensor) -> Tensor:
        """Return the gradients of the sums (n, 1 or 2, S); that of keys' log-weights is kept for `store_keys`.

        Args:
            collect: Where the gradient of the smoothing goes.
            sums: What `sums` gave for all keys.
            weights: What `weights` gave.
            d_weights: Gradient of weights that are yet to be divided by their sum, times that sum, (n, 1, S).
        """
        if self._exponential:
            self._d_bias = d_weights.mul_(weights)
            return torch.cat([self._d_bias, -self._d_bias], 1) if sums.shape[1] == 2 else self._d_bias
        d_mean = None
        if self.tile.smoothing is not None:
            d_mean = (d_weights * self._shares).sum(-1, keepdim=True) * self._below
            d_weights = d_weights - d_mean
            if collect.smoothing is not None:
                collect.smoothing += FLOOR * d_mean * reciprocal(self._total) * self._weight
        self._d_bias = d_weights * weights
        if d_mean is not None:
            self._d_bias += d_mean * self._shares
        d_kernel = d_weights * reciprocal(self._total)
        if self._key_weights is not None:
            d_kernel = d_kernel * self._key_weights
        if collect.smoothing is not None:
            collect.smoothing += d_kernel.sum(-1, keepdim=True)
        if self._angle is None:
            return d_kernel
        self._d_angle = -d_kernel * sums * self._angle.sin()
        return d_kernel * self._angle.cos()

    def slopes(
        self, collect: TileGradients, keys: Tensor, sums: Tensor, d_sums: Tensor, number: int, start: int, stop: int
    ) -> Tensor:
        """Return the gradient of the scores (n, chunk, R) of a chunk of keys with the query, or with the query 0."""
        scores, d_here = self._scores(keys, number), d_sums[:, number, start:stop].unsqueeze(-1)
        if self._exponential:
            # Those of the query 0 are added to these, and made in the same memory.
            slopes = scores if number else self._spare.tokens_first(stop - start)
            torch.sub(scores, sums[:, number, start:stop].unsqueeze(-1), out=slopes)
            return slopes.exp2_().mul_(d_here)
        if collect.frequency_bias is not None and self._frequency_weights is not None:
            collect.frequency_bias += scores.cos().mul_(d_here).sum(1, keepdim=True) * self._frequency_weights
        slopes = scores.sin_().mul_(-d_here)
        return slopes if self._frequency_weights is None else slopes.mul_(self._frequency_weights)

    def store_keys(self, collect: TileGradients, keys: Tensor, d_scores: Tensor, start: int, stop: int) -> None:
        """Write the gradients of keys and of their log-weights."""
        tile, coefficient = self.tile, self.tile.call.kernel.norm_coefficient
        d_bias = self._d_bias[..., start:stop].transpose(1, 2)
        if collect.key_bias is not None:
            tile.add_to_keys(collect.key_bias, d_bias, start, stop)
        d_angle = None if self._angle is None else self._d_angle[..., start:stop]
        more = keys * d_bias * (-2 * coefficient) if coefficient else None
        collect.store_inputs("k", start, stop, keys, d_scores, d_angle=d_angle, more=more)

    def store_query(self, collect: TileGradients, d_scores: Tensor) -> None:
        """Write the gradient of the query, given the sum of those of its scores, (n, 1, R)."""
        if self._exponential and collect.frequency_bias is not None:
            collect.frequency_bias += d_scores
        d_angle = None if self._angle is None else -self._d_angle.sum(-1, keepdim=True)
        collect.store_inputs("q", 0, 1, self.query, d_scores if self._exponential else -d_scores, d_angle=d_angle)
