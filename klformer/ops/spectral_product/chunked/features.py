"""Absorb and read for a map that is not exponential: sums of features, then every query against them.

    state = sum_j w_j [v_j, 1] phi(k_j)^T            (E + 1, F), the size of the feature space, not of the sequence
    [numerator, denominator] = state phi(q)

w_j = exp(b_j - max b) is the weight of a key, 0 for padding; the largest is 1. Weights of frequencies multiply the
state, once, when it is read. The smoothing adds a multiple of sum_j w_j [v_j, 1], and `floor` more for the few queries
that need it. Features stand first and tokens last, (n, F, chunk): the parts of a map lie one after the other.

Backward makes the features again, chunk by chunk.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from klformer.ops.spectral_product.autograd import empty_results, empty_sums
from klformer.ops.spectral_product.chunked import floor
from klformer.ops.spectral_product.chunked.carried import Carried, sums_before, write_sums
from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.pair_offset import demodulate, modulate, turned
from klformer.ops.spectral_product.chunked.tiles import Cut, Scratch, Tile, chunk_bounds, tiles
from klformer.ops.spectral_product.operands import NO_KEY, Call


class Features:
    """Features of a tile's chunks, (n, F, chunk)."""

    def __init__(self, tile: Tile, chunk: int, use: str = "") -> None:
        self._tile = tile
        self.omega = None if tile.omega is None else tile.per_row(tile.call.kernel.omega)  # (n, R, D)
        self._scores = Scratch(tile, chunk, tile.call.num_projections, f"scores {use}")
        self._features = Scratch(tile, chunk, tile.call.num_features, f"features {use}")

    def __call__(self, x: Tensor) -> Tensor:
        """Return those of x (n, chunk, D), in memory that the next call overwrites."""
        scores = self._scores.features_first(x.shape[1])
        if self.omega is None:
            scores.copy_(x.transpose(1, 2))
        else:
            torch.bmm(self.omega, x.transpose(1, 2), out=scores)
        return self._tile.feature_map.features(scores, self._features.features_first(x.shape[1]), dim=1)


def weights_of_keys(tile: Tile) -> tuple[Tensor | None, Tensor]:
    """Return exp(b - max b) of every key, (n, 1, S), 0 for padding, None where all are 1; and max b, (n, 1, 1)."""
    assert tile.call.k is not None
    length = tile.call.k.shape[2]
    if not length:
        return None, tile.new_zeros(1, 1).fill_(NO_KEY)
    bias = tile.log_weights(tile.new_zeros(0, 0), 0, length)
    if bias is None:
        return None, tile.new_zeros(1, 1)
    largest = bias.amax(1, keepdim=True)
    return (bias - largest.masked_fill(largest == -torch.inf, 0)).exp_().transpose(1, 2), largest.clamp(min=NO_KEY)


def weighted_values(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return [v, 1] times the keys' weights (n, 1, chunk): values (n, chunk, E) -> (n, E + 1, chunk)."""
    num_values = values.shape[2]
    rows = values.new_empty(values.shape[0], num_values + 1, values.shape[1])
    rows[:, :num_values] = values.transpose(1, 2)
    rows[:, num_values].fill_(1)
    return rows if weights is None else rows.mul_(weights)


def angle(tile: Tile, x: Tensor) -> Tensor | None:
    """Return x.offset of x (n, chunk, D), (n, 1, chunk), where frequencies come in pairs omega +- offset."""
    return None if tile.pair_offset is None else torch.bmm(tile.pair_offset, x.transpose(1, 2))


def frequency_weights(tile: Tile) -> Tensor | None:
    """Return exp(a) of every feature, (n, 1, F)."""
    bias = tile.frequency_bias
    return None if bias is None else bias.exp().repeat(1, 1, tile.feature_map.parts)


def reciprocal(denominator: Tensor) -> Tensor:
    """Return 1 / denominator, and 0 for a query that had no key to attend to."""
    return denominator.reciprocal().masked_fill_(denominator == 0, 0)


def log_of(denominator: Tensor, log_scale: Tensor, log_normaliser: float) -> Tensor:
    """Return the logarithm of a kernel's sum: -inf for a query without any key, NaN for a sum that is negative."""
    log_sum = denominator.log().add_(log_scale).sub_(log_normaliser)
    return log_sum.masked_fill_(log_sum < NO_KEY / 2, -torch.inf)


def absorb(call: Call, cut: Cut) -> list[Tensor]:
    """Return the sums of keys and values."""
    assert call.k is not None
    sums = empty_sums(call)
    for tile in tiles(call, cut.rows):
        features, carried = Features(tile, cut.chunk), Carried.room(tile)
        weights, carried.shift = weights_of_keys(tile)
        for start, stop in chunk_bounds(call.k.shape[2], cut.chunk):
            keys = tile.keys(start, stop)
            values = weighted_values(tile.values(start, stop), None if weights is None else weights[..., start:stop])
            modulated = modulate(values, angle(tile, keys))
            carried.state.baddbmm_(modulated, features(keys).transpose(1, 2), beta=1 if start else 0)
            if tile.smoothing is not None:
                carried.total += values.sum(-1, keepdim=True)
        if not call.k.shape[2]:
            carried.state.zero_()
        write_sums(tile, carried, sums, 1.0)
    return list(sums)


def absorb_backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Return the gradients of what was absorbed, and of what made features of it."""
    assert call.k is not None
    gradients = Gradients(call, needed)
    for tile in tiles(call, cut.rows):
        collect, features = TileGradients(tile, gradients), Features(tile, cut.chunk)
        scratch = Scratch(tile, cut.chunk, call.num_features, "d_features")
        d_sums = Carried.of(tile, d_results[0], d_results[1])
        weights, _ = weights_of_keys(tile)
        for start, stop in chunk_bounds(call.k.shape[2], cut.chunk):
            here = None if weights is None else weights[..., start:stop]
            keys = tile.keys(start, stop)
            phi, key_angle = features(keys), angle(tile, keys)
            values = weighted_values(tile.values(start, stop), here)
            d_modulated = torch.bmm(d_sums.state, phi)
            d_values = demodulate(d_modulated, key_angle)
            d_angle = None if key_angle is None else (values * turned(d_modulated, key_angle)).sum(1, keepdim=True)
            if tile.smoothing is not None:
                d_values += d_sums.total
            if collect.key_bias is not None:
                d_bias = (d_values * values).sum(1).unsqueeze(-1)
                tile.add_to_keys(collect.key_bias, d_bias, start, stop)
            d_phi = scratch.features_first(stop - start)
            torch.bmm(d_sums.state.transpose(1, 2), modulate(values, key_angle), out=d_phi)
            store_inputs(
                collect, "k", features.omega, keys, tile.feature_map.vjp(phi, d_phi, dim=1), d_angle, start, stop
            )
            d_kept = d_values[:, :-1] if here is None else d_values[:, :-1].mul_(here)
            collect.write("v", start, stop, d_kept.transpose(1, 2))
        collect.finish()
    return gradients.by_name


def read(call: Call, cut: Cut) -> list[Tensor]:
    """Return the result of queries against sums, its log-sums, and its denominators before `floor` adds to them."""
    assert call.q is not None
    (out, log_sums), (denominators,) = empty_results(call), empty_kept(call)
    for tile in tiles(call, cut.rows):
        features, carried = Features(tile, cut.chunk), sums_before(tile, 1.0)
        state = _weighted_state(tile, carried)
        for start, stop in chunk_bounds(call.q.shape[2], cut.chunk):
            queries = tile.queries(start, stop)
            product = _product(tile, state, carried.total, features(queries), angle(tile, queries))
            tile.write(denominators[:, :, start:stop], product[:, -1])
            quotient, divisor = _quotient(tile, product, carried.total)
            log_sum = log_of(divisor, carried.shift, call.kernel.log_normaliser)
            tile.write(log_sums[:, :, start:stop], log_sum.squeeze(1))
            tile.write(out[:, :, start:stop], quotient)
    return [out, log_sums, denominators]


def empty_kept(call: Call) -> list[Tensor]:
    """Return room for the denominators of all queries, (B, H, L)."""
    assert call.q is not None
    return [torch.empty(call.q.shape[:3], dtype=call.dtype, device=call.device)]


def _weighted_state(tile: Tile, carried: Carried) -> Tensor:
    """Return the state times the weights of frequencies."""
    weights = frequency_weights(tile)
    return carried.state if weights is None else carried.state * weights


def _product(tile: Tile, state: Tensor, total: Tensor, phi: Tensor, query_angle: Tensor | None) -> Tensor:
    """Return [numerator, denominator] (n, E + 1, chunk), smoothing included, before `floor` adds to them."""
    product = demodulate(torch.bmm(state, phi), query_angle)
    return product if tile.smoothing is None else product.addcmul_(total, tile.smoothing)


def _quotient(tile: Tile, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result (n, chunk, E), and what was divided by, (n, 1, chunk). Overwrites the product."""
    if tile.smoothing is not None:
        floor.raised(product, total, tile.smoothing)
    denominator = product[:, -1:]
    return product[:, :-1].mul_(reciprocal(denominator)).transpose(1, 2), denominator


def read_backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Return the gradients of queries and sums, and of what made features of the queries."""
    assert call.q is not None
    gradients, (d_out, d_log_sum) = Gradients(call, needed), d_results
    for tile in tiles(call, cut.rows):
        collect, features, carried = TileGradients(tile, gradients), Features(tile, cut.chunk), sums_before(tile, 1.0)
        uses = ("d_features",) if tile.pair_offset is None else ("d_features", "d_features of sines")
        scratches = [Scratch(tile, cut.chunk, call.num_features, use) for use in uses]
        state, total, smoothing = _weighted_state(tile, carried), carried.total, tile.smoothing
        d_sums, d_added, d_scale = Carried.room(tile), torch.zeros_like(total), tile.new_zeros(1)
        rounded = outputs[0].dtype != call.dtype
        for start, stop in chunk_bounds(call.q.shape[2], cut.chunk):
            queries = tile.queries(start, stop)
            phi, query_angle = features(queries), angle(tile, queries)
            denominator = tile.rows(outputs[2][:, :, start:stop]).unsqueeze(1)
            if rounded:  # then it is made again
                quotient = _quotient(tile, _product(tile, state, total, phi, query_angle), total)[0]
            else:
                quotient = tile.chunk(outputs[0], start, stop)
            d_here = None if d_log_sum is None else tile.rows(d_log_sum[:, :, start:stop])
            d_quotient = None if d_out is None else tile.chunk(d_out, start, stop)
            d_product, raised = quotient_vjp(denominator, total, smoothing, quotient, d_quotient, d_here)
            if d_here is not None:
                d_scale += d_here.sum(-1, keepdim=True)
            if smoothing is not None:
                d_added += d_product.sum(-1, keepdim=True)
            if raised is not None:
                d_sums.total += raised[0].sum(-1, keepdim=True)
                if collect.smoothing is not None:
                    collect.smoothing += raised[1].sum(-1, keepdim=True)
            d_modulated = modulate(d_product, query_angle)
            d_sums.state.baddbmm_(d_modulated, phi.transpose(1, 2), beta=1 if start else 0)
            d_phi, d_angle = _read_vjp(state, phi, d_product, query_angle, scratches)
            d_scores = tile.feature_map.vjp(phi, d_phi, dim=1)
            store_inputs(collect, "q", features.omega, queries, d_scores, d_angle, start, stop)
        if not call.q.shape[2]:
            d_sums.state.zero_()
        if smoothing is not None:
            d_sums.total.addcmul_(d_added, smoothing)
            if collect.smoothing is not None:
                collect.smoothing += (d_added * total).sum(1, keepdim=True)
        if collect.frequency_bias is not None:
            by_feature = (d_sums.state * state).sum(1, keepdim=True)
            collect.frequency_bias += by_feature.view(tile.num_rows, tile.feature_map.parts, -1).sum(1, keepdim=True)
        if (weights := frequency_weights(tile)) is not None:
            d_sums.state.mul_(weights)
        d_sums.write(tile, gradients.by_name["values"], gradients.by_name["weights"])
        tile.write(gradients.by_name["log_scale"], d_scale)
        collect.finish()
    return gradients.by_name


def quotient_vjp(
    denominator: Tensor,
    total: Tensor,
    smoothing: Tensor | None,
    quotient: Tensor,
    d_quotient: Tensor | None,
    d_log_sum: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the gradient of [numerator, denominator] (n, E + 1, chunk), and what `floor.raised_vjp` gives.

    Args:
        denominator: Before `floor` adds to it, (n, 1, chunk).
        total: The weighted values that a query sees, (n, E + 1, chunk or 1).
        smoothing: (n, 1, 1).
        quotient: The result (n, chunk, E) in the working precision.
        d_quotient: Its gradient; None for zero.
        d_log_sum: Gradient of the log-sums (n, chunk); None for zero.
    """
    divisor = denominator
    if smoothing is not None:
        divisor = floor.raised_denominator(denominator, total, smoothing)
    d_quotient = torch.zeros_like(quotient) if d_quotient is None else d_quotient
    d_product = weighted_values(d_quotient, reciprocal(divisor))
    of_denominator = (d_quotient * quotient).sum(-1).neg_()
    if d_log_sum is not None:
        of_denominator += d_log_sum
    d_product[:, -1] *= of_denominator
    return d_product, None if smoothing is None else floor.raised_vjp(d_product, denominator, total, smoothing)


def _read_vjp(
    state: Tensor, phi: Tensor, d_product: Tensor, query_angle: Tensor | None, scratch: list[Scratch]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the features (n, F, chunk) and of the angles (n, 1, chunk) of queries."""
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


def store_inputs(
    collect: TileGradients,
    name: str,
    omega: Tensor | None,
    x: Tensor,
    d_scores: Tensor,
    d_angle: Tensor | None,
    start: int,
    stop: int,
) -> None:
    """Write the gradient of a chunk x (n, chunk, D) of queries or keys, and add to those of the frequencies.

    Args:
        omega: (n, R, D).
        d_scores: (n, R, chunk).
        d_angle: (n, 1, chunk).
    """
    tile = collect.tile
    if omega is None:
        collect.write(name, start, stop, d_scores.transpose(1, 2))
        return
    if collect.omega is not None:
        by_row = torch.bmm(d_scores, x)  # (n, R, D)
        heads = collect.omega.shape[0]
        collect.omega += by_row.view(heads, -1, *by_row.shape[1:]).sum(1)
    if d_angle is None or tile.pair_offset is None:
        collect.store(name, start, stop, d_scores.transpose(1, 2), omega)
        return
    d_x = torch.bmm(d_scores.transpose(1, 2), omega)
    collect.write(name, start, stop, d_x.baddbmm_(d_angle.transpose(1, 2), tile.pair_offset))
    if collect.pair_offset is not None:
        collect.pair_offset.baddbmm_(d_angle, x)
