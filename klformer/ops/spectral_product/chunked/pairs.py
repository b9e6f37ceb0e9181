"""The product of few queries: the kernel of every pair of a query and a key, and no state.

    out_i = sum_j W_ij v_j / sum_j W_ij        W_ij = w_j phi(q_i).phi(k_j) + w_j smoothing

A state costs F E operations a key and a query, pairs cost F + E each: less if there are few tokens, or few queries, as
in the last layer of a classifier that looks at CLS.

Exponential maps: features of a chunk of keys refer to the largest score of each frequency, those of a query then to its
largest sum of both, so that the largest pair of a query is at least 1. With H the gradient of W, the gradients of the
features are H^T phi(q) and H phi(k).
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from klformer.ops.spectral_product.autograd import empty_results
from klformer.ops.spectral_product.chunked import exponential
from klformer.ops.spectral_product.chunked.exponential import LN_2, LOG2_E
from klformer.ops.spectral_product.chunked.features import (
    Features,
    angle,
    frequency_weights,
    log_of,
    reciprocal,
    store_inputs,
    weights_of_keys,
)
from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.tiles import Cut, Scratch, Tile, chunk_bounds, tiles
from klformer.ops.spectral_product.operands import FLOOR, NO_KEY, Call

#: Features of all queries are made at once.
MAX_QUERIES = 256


def serves(call: Call) -> bool:
    """Return whether pairs cost less than a state. In a program that is exported lengths are not known."""
    if torch.compiler.is_exporting() or call.q is None or not 0 < call.q.shape[2] <= MAX_QUERIES:
        return False
    queries, keys = call.q.shape[2], call.tokens.shape[2]
    features, values = call.kernel.state_features(call.head_dim), call.value_dim
    return queries * keys * (features + values) <= (queries + keys) * features * values


def empty_kept(call: Call) -> list[Tensor]:
    """Return room for a number of every pair, (B, H, L, S)."""
    assert call.q is not None
    shape = (*call.q.shape[:3], call.tokens.shape[2])
    return [torch.empty(shape, dtype=call.dtype, device=call.device)]


def forward(call: Call, cut: Cut) -> list[Tensor]:
    """Return the result, its log-sums, and what backward needs."""
    (out, log_sum), (kept,) = empty_results(call), empty_kept(call)
    for tile in tiles(call, cut.rows):
        pairs = _pairs_of(tile, cut)
        products, weights, logs = pairs.forward()
        tile.write(kept, products)
        tile.write(log_sum, logs.squeeze(-1))
        result = tile.new_zeros(out.shape[2], out.shape[3])
        for start, stop in pairs.chunks():
            result.baddbmm_(weights[..., start:stop], tile.values(start, stop), beta=1 if start else 0)
        tile.write(out, result)
    return [out, log_sum, kept]


def backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Return the gradients of the tensors that are needed.

    A fourth output are the log-sums of these keys where the others are of more (`ChunkedBackend.among_others`).
    """
    gradients, (out, log_sum, kept, *own), (d_out, d_log_sum) = Gradients(call, needed), outputs, d_results
    for tile in tiles(call, cut.rows):
        collect, pairs = TileGradients(tile, gradients), _pairs_of(tile, cut)
        logs = tile.rows(own[0] if own else log_sum).unsqueeze(-1)
        weights = pairs.weights(tile.rows(kept), logs)
        share = (logs - tile.rows(log_sum).clamp(min=NO_KEY).unsqueeze(-1)).exp_() if own else None
        d_result = tile.new_zeros(out.shape[2], out.shape[3]) if d_out is None else tile.rows(d_out)
        d_shared = d_result if share is None else d_result * share
        d_weights = torch.empty_like(weights)  # of weights that are yet to be divided by their sum, times that sum
        for start, stop in pairs.chunks():
            collect.store("v", start, stop, weights[..., start:stop].mT, d_shared)
            torch.bmm(d_result, tile.values(start, stop).mT, out=d_weights[..., start:stop])
        excess = (d_weights * weights if share is None else d_result * tile.rows(out)).sum(-1, keepdim=True)
        if d_log_sum is not None:
            excess -= tile.rows(d_log_sum).unsqueeze(-1)
        d_weights -= excess
        pairs.backward(collect, weights, d_weights if share is None else d_weights.mul_(share))
        collect.finish()
    return gradients.by_name


class _Pairs:
    """The pairs of a tile's queries, with its keys in chunks."""

    def __init__(self, tile: Tile, cut: Cut) -> None:
        assert tile.call.q is not None
        self.tile, self._cut = tile, cut
        self.num_queries, self.num_keys = tile.call.q.shape[2], tile.call.tokens.shape[2]
        self.queries = tile.queries(0, self.num_queries)

    def chunks(self) -> Iterator[tuple[int, int]]:
        return chunk_bounds(self.num_keys, self._cut.chunk)

    def empty(self) -> Tensor:
        """Return room for a number of each pair, (n, L, S)."""
        shape = (self.tile.num_rows, self.num_queries, self.num_keys)
        return torch.empty(shape, dtype=self.tile.dtype, device=self.queries.device)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is kept of pairs (n, L, S), their weights, and the log-sums (n, L, 1).

        The weights of a query sum to one if it has a key.
        """
        raise NotImplementedError

    def weights(self, kept: Tensor, log_sum: Tensor) -> Tensor:
        """Return the weights again."""
        raise NotImplementedError

    def backward(self, collect: TileGradients, weights: Tensor, d_weights: Tensor) -> None:
        """Write the gradients of queries and keys, given those of weights that are yet to be divided by their sum."""
        raise NotImplementedError


def _pairs_of(tile: Tile, cut: Cut) -> _Pairs:
    return (_Exponential if tile.feature_map.exponential else _Features)(tile, cut)


class _Exponential(_Pairs):
    """Pairs of exponential features, tokens first: (n, L, R) and (n, chunk, R)."""

    def __init__(self, tile: Tile, cut: Cut) -> None:
        super().__init__(tile, cut)
        assert tile.omega is not None
        uses = [("scores", cut.chunk), ("spare", cut.chunk), ("d_scores", cut.chunk), ("of queries", self.num_queries)]
        self._keys, self._spare, self._products, self._phi = (
            Scratch(tile, length, tile.call.num_projections, use) for use, length in uses
        )
        scores = tile.project(self.queries, tile.omega * LOG2_E, tile.new_zeros(self.num_queries, tile.omega.shape[1]))
        self._scores = scores if tile.frequency_bias is None else scores + tile.frequency_bias * LOG2_E

    def _make(self, start: int, stop: int) -> None:
        """Make the features of a chunk of keys, and those of the queries beside them."""
        spare = self._spare.tokens_first(stop - start)
        self.keys, scores, self.shares = exponential.key_scores(self.tile, self._keys, start, stop, spare)
        shift = scores.amax(1, keepdim=True).clamp_(min=NO_KEY)
        self.phi_k = scores.sub_(shift).exp2_()
        of_queries = torch.add(self._scores, shift, out=self._phi.tokens_first(self.num_queries))
        self.largest = of_queries.amax(-1, keepdim=True)
        self.phi_q = of_queries.sub_(self.largest).exp2_()

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        found, scale = self.empty(), self.tile.new_zeros(self.num_queries, 1).fill_(NO_KEY)
        for start, stop in self.chunks():
            self._make(start, stop)
            if self.num_queries == 1:  # a matrix-vector product costs as much as many columns
                products = torch.mul(self.phi_k, self.phi_q, out=self._products.tokens_first(stop - start))
                torch.sum(products, -1, out=found[:, 0, start:stop])
            else:
                found[..., start:stop] = torch.bmm(self.phi_q, self.phi_k.mT)
            largest = torch.maximum(scale, self.largest)
            found[..., :start] *= scale.sub_(largest).exp2_()
            found[..., start:stop] *= self.largest.sub_(largest).exp2_()
            scale = largest
        total = found.sum(-1, keepdim=True)
        found *= reciprocal(total)
        return found, found, log_of(total, scale * LN_2, self.tile.call.kernel.log_normaliser)

    def weights(self, kept: Tensor, log_sum: Tensor) -> Tensor:
        log_sum = log_sum.masked_fill(log_sum == -torch.inf, torch.inf)  # without any key all weights are 0
        self._total = log_sum.add_(self.tile.call.kernel.log_normaliser).mul_(LOG2_E)
        return kept

    def backward(self, collect: TileGradients, weights: Tensor, d_weights: Tensor) -> None:
        d_queries = torch.zeros_like(self._scores)
        for start, stop in self.chunks():
            self._make(start, stop)
            d_pairs, room = d_weights[..., start:stop] * (self.largest - self._total).exp2_(), self._products
            if self.num_queries == 1:
                d_keys = torch.mul(self.phi_k, d_pairs.mT, out=room.tokens_first(stop - start)).mul_(self.phi_q)
                d_queries += d_keys.sum(1, keepdim=True)
            else:
                d_keys = torch.bmm(d_pairs.mT, self.phi_q, out=room.tokens_first(stop - start)).mul_(self.phi_k)
                d_queries += torch.bmm(d_pairs, self.phi_k).mul_(self.phi_q)
            exponential.store_keys(collect, self.keys, d_keys, self.shares, start, stop)
        if collect.frequency_bias is not None:
            collect.frequency_bias += d_queries.sum(1, keepdim=True)
        collect.store_inputs("q", 0, self.num_queries, self.queries, d_queries)


class _Features(_Pairs):
    """Pairs of other features, which stand first: (n, F, L) and (n, F, chunk)."""

    def __init__(self, tile: Tile, cut: Cut) -> None:
        super().__init__(tile, cut)
        of_queries, frequencies = Features(tile, self.num_queries, "of queries"), frequency_weights(tile)
        phi = of_queries(self.queries)
        self._phi = phi if frequencies is None else phi.mul_(frequencies.mT)
        self._features, self._room = Features(tile, cut.chunk), Scratch(tile, cut.chunk, len(phi[0]), "d_features")
        self._key_weights, self._log_scale = weights_of_keys(tile)
        self._angle: Tensor | None = None
        query_angle, key_angle = angle(tile, self.queries), angle(tile, tile.keys(0, self.num_keys))
        if query_angle is not None and key_angle is not None:
            self._angle = key_angle - query_angle.mT  # (n, L, S)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        products = self.empty()
        for start, stop in self.chunks():
            phi = self._features(self.tile.keys(start, stop))
            if self.num_queries == 1:
                torch.sum(torch.mul(phi, self._phi, out=self._spare(phi)), 1, out=products[:, 0, start:stop])
            else:
                products[..., start:stop] = torch.bmm(self._phi.mT, phi)
        weights = self.weights(products, products)
        log_sum = log_of(self._total, self._log_scale, self.tile.call.kernel.log_normaliser)
        return products, weights, log_sum

    def _spare(self, phi: Tensor) -> Tensor:
        return self._room.features_first(phi.shape[2])

    def weights(self, kept: Tensor, log_sum: Tensor) -> Tensor:
        self._products, smoothing = kept, self.tile.smoothing
        kernel = kept if self._angle is None else kept * self._angle.cos()
        kernel = kernel if smoothing is None else kernel + smoothing
        kernel = kernel if self._key_weights is None else kernel * self._key_weights
        if smoothing is not None:
            kernel = self._raised(kernel, smoothing)
        self._total = kernel.sum(-1, keepdim=True)
        self._inverse = reciprocal(self._total)
        return kernel * self._inverse

    def _raised(self, kernel: Tensor, smoothing: Tensor) -> Tensor:
        """As `floor` does, where the whole kernel is there."""
        keys = kernel.new_ones(len(kernel), 1, self.num_keys) if self._key_weights is None else self._key_weights
        self._weight = keys.sum(-1, keepdim=True)  # (n, 1, 1)
        self._shares = keys * reciprocal(self._weight)
        missing = FLOOR * smoothing - kernel.sum(-1, keepdim=True) * reciprocal(self._weight)
        self._below = missing > 0
        return torch.addcmul(kernel, missing.clamp_(min=0), keys)

    def backward(self, collect: TileGradients, weights: Tensor, d_weights: Tensor) -> None:
        tile, d_bias = self.tile, d_weights * weights
        if tile.smoothing is not None:
            d_mean = (d_weights * self._shares).sum(-1, keepdim=True) * self._below
            d_weights, d_bias = d_weights - d_mean, d_bias - d_mean * (weights - self._shares)
            if collect.smoothing is not None:
                d_floor = d_mean * self._inverse * self._weight
                collect.smoothing += FLOOR * d_floor.sum(1, keepdim=True)
        if collect.key_bias is not None:
            tile.add_to_keys(collect.key_bias, d_bias.sum(1).unsqueeze(-1), 0, self.num_keys)
        d_kernel = d_weights * self._inverse
        d_kernel = d_kernel if self._key_weights is None else d_kernel * self._key_weights
        if collect.smoothing is not None:
            collect.smoothing += d_kernel.sum((1, 2), keepdim=True)
        d_angle: Tensor | None = None
        if self._angle is not None:
            d_angle = d_kernel * self._products * self._angle.sin()  # (n, L, S), with the other sign
            d_kernel = d_kernel * self._angle.cos()
        d_phi_q = torch.zeros_like(self._phi)
        for start, stop in self.chunks():
            keys, d_here = tile.keys(start, stop), d_kernel[..., start:stop]
            phi = self._features(keys)
            if self.num_queries == 1:
                d_phi_q += torch.mul(phi, d_here, out=self._spare(phi)).sum(-1, keepdim=True)
            else:
                d_phi_q += torch.bmm(phi, d_here.mT)
            d_scores = tile.feature_map.vjp(phi, torch.bmm(self._phi, d_here, out=self._spare(phi)), dim=1)
            of_angle = None if d_angle is None else -d_angle[..., start:stop].sum(1, keepdim=True)
            store_inputs(collect, "k", self._features.omega, keys, d_scores, of_angle, start, stop)
        if collect.frequency_bias is not None:
            by_feature = (d_phi_q * self._phi).sum(-1).view(tile.num_rows, tile.feature_map.parts, -1)
            collect.frequency_bias += by_feature.sum(1, keepdim=True)
        of_angle = None if d_angle is None else d_angle.sum(-1).unsqueeze(1)
        d_scores = tile.feature_map.vjp(self._phi, d_phi_q, dim=1)
        store_inputs(collect, "q", self._features.omega, self.queries, d_scores, of_angle, 0, self.num_queries)
