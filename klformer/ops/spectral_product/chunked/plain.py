"""Bidirectional product of a map that is not exponential: all keys into a state, then every query against it.

    state = sum_j w_j [v_j, 1] phi(k_j)^T            (E + 1, F), the size of the feature space, not of the sequence
    [numerator, denominator] = state phi(q)

w_j = exp(b_j - max b) is the weight of a key, 0 for padding; the largest is 1, and a common factor cancels. Weights of
frequencies multiply the state, once. The smoothing adds a multiple of sum_j w_j [v_j, 1].

Features stand first and tokens last, (n, F, chunk): the parts of a map lie one after the other, and the row of ones
beside the values is a row more of a matrix product, which costs what it should (a column more would cost up to 60%).

`floor` adds to it for the few queries that need more. Forward keeps the state and the denominators, before that is
added, and the features where there is room (`keep`). Backward makes features again that were not kept.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked import floor
from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.modulation import demodulate, modulate, turned
from klformer.ops.spectral_product.chunked.tiling import Cut, Scratch, Tile, chunk_bounds, tiles
from klformer.ops.spectral_product.operands import SpectralOperands


@dataclass
class Residuals:
    """The result, and what backward needs besides the operands. Rows are (batch, head) pairs, B * H of them."""

    out: Tensor  # (B, H, L, E)
    denominator: Tensor  # (B * H, 1, L)
    state: Tensor  # (B * H, W, F)
    total: Tensor  # (B * H, E + 1, 1)
    query_features: Tensor  # (B * H, F, L), L = 0 if they are not kept
    key_features: Tensor  # (B * H, F, S), S = 0 if they are not kept

    @staticmethod
    def empty(operands: SpectralOperands, *, keep: bool) -> "Residuals":
        batch, heads, length, _ = operands.q.shape
        rows, num_values = batch * heads, operands.v.shape[-1]

        def empty(*shape: int, dtype: torch.dtype = operands.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=operands.q.device)

        return Residuals(
            out=empty(batch, heads, length, num_values, dtype=operands.v.dtype),
            denominator=empty(rows, 1, length),
            state=empty(rows, operands.value_columns, operands.num_features),
            total=empty(rows, num_values + 1, 1),
            query_features=empty(rows, operands.num_features, length if keep else 0),
            key_features=empty(rows, operands.num_features, operands.k.shape[2] if keep else 0),
        )

    def as_list(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


class Features:
    """Features of a tile's chunks, (n, F, chunk)."""

    def __init__(self, tile: Tile, chunk: int) -> None:
        self._tile = tile
        self._scores = Scratch(tile, chunk, tile.operands.num_projections, "scores")
        self._features = Scratch(tile, chunk, tile.operands.num_features, "features")

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Of x (n, chunk, D). Written to `out`, or to memory that the next call overwrites."""
        scores = self._scores.features_first(x.shape[1])
        if self._tile.omega is None:
            scores.copy_(x.transpose(1, 2))
        else:
            torch.bmm(self._tile.omega, x.transpose(1, 2), out=scores)
        out = self._features.features_first(x.shape[1]) if out is None else out
        return self._tile.feature_map.features(scores, out, dim=1)

    def make_or_read(self, x: Tensor, kept: Tensor, start: int, stop: int, *, made: bool) -> Tensor:
        """Features of a chunk: from `kept` (n, F, length or 0) if they are `made`; else made, and kept if they can."""
        if not kept.shape[2]:
            return self(x)
        place = kept[:, :, start:stop]
        return place if made else self(x, place)


def weights_of_keys(tile: Tile) -> Tensor | None:
    """exp(b - max b) of every key, (n, 1, S), 0 for padding; None where all are 1."""
    bias = tile.log_weights()
    if bias is None or not bias.shape[1]:
        return None
    largest = bias.amax(1, keepdim=True)
    return (bias - largest.masked_fill(largest == -torch.inf, 0)).exp_().transpose(1, 2)


def weighted_values(values: Tensor, weights: Tensor | None) -> Tensor:
    """[v, 1] times the keys' weights (n, 1, chunk): values (n, chunk, E) -> (n, E + 1, chunk)."""
    num_values = values.shape[2]
    rows = values.new_empty(values.shape[0], num_values + 1, values.shape[1])
    rows[:, :num_values] = values.transpose(1, 2)
    rows[:, num_values] = 1
    return rows if weights is None else rows.mul_(weights)


def angle(tile: Tile, x: Tensor) -> Tensor | None:
    """x.offset of x (n, chunk, D), (n, 1, chunk), where frequencies come in pairs omega + offset and omega - offset."""
    return None if tile.pair_offset is None else torch.bmm(tile.pair_offset, x.transpose(1, 2))


def frequency_weights(tile: Tile) -> Tensor | None:
    """exp(a) of every feature, (n, 1, F)."""
    bias = tile.frequency_bias
    return None if bias is None else bias.exp().repeat(1, 1, tile.feature_map.parts)


def reciprocal(denominator: Tensor) -> Tensor:
    """1 / denominator, and 0 for a query that had no key to attend to."""
    return denominator.reciprocal().masked_fill_(denominator == 0, 0)


def empty(operands: SpectralOperands, *, keep: bool) -> list[Tensor]:
    """Room for what `forward` gives."""
    return Residuals.empty(operands, keep=keep).as_list()


def forward(operands: SpectralOperands, cut: Cut, *, keep: bool) -> list[Tensor]:
    """The result, and what backward needs."""
    saved = Residuals.empty(operands, keep=keep)
    for tile in tiles(operands, cut.rows):
        features, rows = Features(tile, cut.chunk), tile.rows
        saved.state[rows], saved.total[rows] = add_up_keys(tile, features, cut.chunk, saved.key_features[rows])
        read_queries(tile, features, cut.chunk, saved)
    return saved.as_list()


def read_queries(tile: Tile, features: Features, chunk: int, saved: Residuals) -> None:
    """Write the results of all queries and their denominators, given the state in `saved`."""
    rows, weights = tile.rows, frequency_weights(tile)
    state = saved.state[rows] if weights is None else saved.state[rows] * weights
    total = saved.total[rows]
    added = None if tile.smoothing is None else total * tile.smoothing
    out, kept = saved.out.flatten(0, 1)[rows], saved.query_features[rows]
    for start, stop in chunk_bounds(tile.operands.q.shape[2], chunk):
        queries = tile.queries(start, stop)
        phi = features.make_or_read(queries, kept, start, stop, made=False)
        product = demodulate(torch.bmm(state, phi), angle(tile, queries))
        if added is not None:
            product += added
        saved.denominator[rows, :, start:stop] = product[:, -1:]
        if tile.smoothing is not None:
            floor.raised(product, total, tile.smoothing)
        out[:, start:stop] = product[:, :-1].mul_(reciprocal(product[:, -1:])).transpose(1, 2)


def add_up_keys(tile: Tile, features: Features, chunk: int, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Add up all keys and values: the state (n, W, F), and the total (n, E + 1, 1) of the weighted values."""
    operands, weights = tile.operands, weights_of_keys(tile)
    state = tile.new_zeros(operands.value_columns, operands.num_features)
    total = tile.new_zeros(operands.v.shape[-1] + 1, 1)
    for start, stop in chunk_bounds(operands.k.shape[2], chunk):
        keys = tile.keys(start, stop)
        phi = features.make_or_read(keys, kept, start, stop, made=False)
        values = weighted_values(tile.values(start, stop), None if weights is None else weights[..., start:stop])
        state.baddbmm_(modulate(values, angle(tile, keys)), phi.transpose(1, 2))
        if tile.smoothing is not None:
            total += values.sum(-1, keepdim=True)
    return state, total


def backward(
    operands: SpectralOperands, saved_list: list[Tensor], d_out: Tensor, needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Gradients of the operands that are needed."""
    gradients, saved = Gradients(operands, needed), Residuals(*saved_list)
    for tile in tiles(operands, cut.rows):
        collect, features = TileGradients(tile, gradients), Features(tile, cut.chunk)
        uses = ("d_features",) if tile.pair_offset is None else ("d_features", "d_features of sines")
        d_scratch = [Scratch(tile, cut.chunk, operands.num_features, use) for use in uses]
        d_state, d_total = backward_queries(tile, collect, features, d_scratch, saved, d_out, cut.chunk)
        d_smoothed = None if tile.smoothing is None else d_total
        backward_keys(
            tile, collect, features, d_scratch[0], saved.key_features[tile.rows], d_state, d_smoothed, cut.chunk
        )
        collect.finish()
    return gradients.by_name


def backward_queries(
    tile: Tile,
    collect: TileGradients,
    features: Features,
    d_scratch: list[Scratch],
    saved: Residuals,
    d_out: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of queries; returns those of the state (n, W, F) and of the total (n, E + 1, 1)."""
    rows, weights = tile.rows, frequency_weights(tile)
    state = saved.state[rows] if weights is None else saved.state[rows] * weights
    total, smoothing = saved.total[rows], tile.smoothing
    d_state, d_total, d_added = torch.zeros_like(state), torch.zeros_like(total), torch.zeros_like(total)
    for start, stop in chunk_bounds(tile.operands.q.shape[2], chunk):
        queries = tile.queries(start, stop)
        phi = features.make_or_read(queries, saved.query_features[rows], start, stop, made=True)
        denominator, raised = saved.denominator[rows, :, start:stop], None
        if smoothing is None:
            d_product = product_gradient(tile, d_out, saved.out, denominator, start, stop)
        else:
            divisor = floor.raised_denominator(denominator, total, smoothing)
            d_product = product_gradient(tile, d_out, saved.out, divisor, start, stop)
            raised = floor.raised_vjp(d_product, denominator, total, smoothing)
            d_added += d_product.sum(-1, keepdim=True)
        if raised is not None:
            d_total += raised[0].sum(-1, keepdim=True)
            if collect.smoothing is not None:
                collect.smoothing += raised[1].sum(-1, keepdim=True)
        query_angle = angle(tile, queries)
        d_state.baddbmm_(modulate(d_product, query_angle), phi.transpose(1, 2))
        d_phi, d_angle = _read_vjp(state, phi, d_product, query_angle, d_scratch)
        store(collect, "q", queries, tile.feature_map.vjp(phi, d_phi, dim=1), d_angle, start, stop)
    if collect.smoothing is not None:
        collect.smoothing += (d_added * total).sum(1, keepdim=True)
    if smoothing is not None:
        d_total.addcmul_(d_added, smoothing)
    if collect.frequency_bias is not None:
        by_feature = (d_state * state).sum(1, keepdim=True)
        collect.frequency_bias += by_feature.view(tile.num_rows, tile.feature_map.parts, -1).sum(1, keepdim=True)
    return d_state if weights is None else d_state.mul_(weights), d_total


def _read_vjp(
    state: Tensor, phi: Tensor, d_product: Tensor, query_angle: Tensor | None, scratch: list[Scratch]
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the features (n, F, chunk) and of the angles (n, 1, chunk) of queries, given that of the product."""
    d_even = scratch[0].features_first(phi.shape[2])
    if query_angle is None:
        return torch.bmm(state.transpose(1, 2), d_product, out=d_even), None
    d_odd = scratch[1].features_first(phi.shape[2])
    even, odd = state.chunk(2, dim=1)
    torch.bmm(even.transpose(1, 2), d_product, out=d_even)
    torch.bmm(odd.transpose(1, 2), d_product, out=d_odd)
    cos, sin = query_angle.cos(), query_angle.sin()
    by_even, by_odd = ((phi * x).sum(1, keepdim=True) for x in (d_even, d_odd))
    return d_even.mul_(cos).addcmul_(d_odd, sin), by_odd.mul_(cos).addcmul_(by_even, sin, value=-1)


def product_gradient(tile: Tile, d_out: Tensor, out: Tensor, denominator: Tensor, start: int, stop: int) -> Tensor:
    """Gradient of [numerator, denominator] (n, E + 1, chunk); denominator (n, 1, chunk)."""
    d_quotient, quotient = tile.chunk(d_out, start, stop), tile.chunk(out, start, stop)
    d_product = weighted_values(d_quotient, reciprocal(denominator))
    d_product[:, -1] *= -(d_quotient * quotient).sum(-1)
    return d_product


def backward_keys(
    tile: Tile,
    collect: TileGradients,
    features: Features,
    d_scratch: Scratch,
    kept: Tensor,
    d_state: Tensor,
    d_total: Tensor | None,
    chunk: int,
) -> None:
    """Write the gradients of keys and values, given those of the state (n, W, F) and, with smoothing, of the total
    (n, E + 1, 1); `kept` are the keys' features, where there are any."""
    weights = weights_of_keys(tile)
    for start, stop in chunk_bounds(tile.operands.k.shape[2], chunk):
        here = None if weights is None else weights[..., start:stop]
        keys = tile.keys(start, stop)
        phi = features.make_or_read(keys, kept, start, stop, made=True)
        values, key_angle = weighted_values(tile.values(start, stop), here), angle(tile, keys)
        modulated = modulate(values, key_angle)
        d_modulated = torch.bmm(d_state, phi)
        d_values = demodulate(d_modulated, key_angle)
        d_angle = None if key_angle is None else (values * turned(d_modulated, key_angle)).sum(1, keepdim=True)
        if d_total is not None:
            d_values += d_total
        if collect.key_bias is not None:
            collect.key_bias[:, start:stop] = (d_values * values).sum(1).unsqueeze(-1)
        d_phi = torch.bmm(d_state.transpose(1, 2), modulated, out=d_scratch.features_first(stop - start))
        store(collect, "k", keys, tile.feature_map.vjp(phi, d_phi, dim=1), d_angle, start, stop)
        d_kept = d_values[:, :-1] if here is None else d_values[:, :-1].mul_(here)
        collect.write("v", start, stop, d_kept.transpose(1, 2))


def store(
    collect: TileGradients, name: str, x: Tensor, d_scores: Tensor, d_angle: Tensor | None, start: int, stop: int
) -> None:
    """Write the gradient of a chunk x (n, chunk, D) of queries or keys, given those of its scores (n, R, chunk) and of
    its angle (n, 1, chunk); add to those of the frequencies."""
    tile = collect.tile
    if tile.omega is None:
        collect.write(name, start, stop, d_scores.transpose(1, 2))
        return
    if collect.omega is not None:
        collect.omega.baddbmm_(d_scores, x)
    if d_angle is None or tile.pair_offset is None:
        collect.store(name, start, stop, d_scores.transpose(1, 2), tile.omega)
        return
    d_x = torch.bmm(d_scores.transpose(1, 2), tile.omega)
    collect.write(name, start, stop, d_x.baddbmm_(d_angle.transpose(1, 2), tile.pair_offset))
    if collect.pair_offset is not None:
        collect.pair_offset.baddbmm_(d_angle, x)
