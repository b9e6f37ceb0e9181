"""The linear-time product without a causal mask: all keys into a state, then every query against it.

    state = sum_s phi(k_s) [v_s, 1]^T            (F, W), the size of the feature space, not of the sequence
    [numerator, denominator] = phi(q) state

Forward keeps the state and the denominators; backward makes the features again, chunk by chunk. Exponential maps are
stabilised exactly: keys' scores lose their maximum over all keys, feature by feature (a running one, the state being
rescaled as it rises); queries' scores gain it and lose their own maximum. Both cancel in the quotient, every feature
is in (0, 1], and the denominator is at least 1. The maxima are constants for the gradient, because the quotient does
not depend on them. Log-weights of keys are stabilised in the same way for the other maps.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.chunk import (
    absorb_chunk,
    attend_chunk,
    empty_state,
    key_chunk,
    key_scores,
    query_features,
    query_scores,
)
from klformer.ops.spectral_product.chunked.modulation import modulate, modulate_vjp
from klformer.ops.spectral_product.chunked.residuals import Gradients, Residuals, TileGradients
from klformer.ops.spectral_product.chunked.tiling import chunk_bounds, tiles
from klformer.ops.spectral_product.operands import SpectralOperands


def empty(operands: SpectralOperands) -> Residuals:
    """Room for what `forward` gives."""
    return Residuals.empty(operands, num_states=1, segmented=False)


def forward(operands: SpectralOperands, chunk: int) -> Residuals:
    """The normalised product of every query with all keys."""
    saved = empty(operands)
    for tile in tiles(operands, chunk):
        state = empty_state(tile)
        for start, stop in chunk_bounds(operands.k.shape[2], chunk):
            absorb_chunk(state, tile, start, stop)
        saved.save_state(tile, state)
        for start, stop in chunk_bounds(operands.q.shape[2], chunk):
            saved.store(attend_chunk(state, tile, tile.queries(start, stop)), tile, start, stop)
    return saved


def backward(
    operands: SpectralOperands, saved: Residuals, d_out: Tensor, needed: Collection[str], chunk: int
) -> dict[str, Tensor]:
    """Gradients of the operands that are needed."""
    gradients, fmap = Gradients(operands, needed), operands.feature_map
    for tile in tiles(operands, chunk):
        collect = TileGradients(tile, gradients)
        state = saved.load_state(tile)
        d_state = torch.zeros_like(state.product)
        d_total = state.product.new_zeros(tile.num_rows, 1, operands.v.shape[-1] + 1)
        for start, stop in chunk_bounds(operands.q.shape[2], chunk):
            queries = tile.queries(start, stop)
            scores = query_scores(tile, queries, state.shift)
            if fmap.exponential:
                scores -= saved.query_shift[tile.rows, start:stop]
            phi = query_features(tile, scores)
            d_product, d_angle = saved.product_gradient(tile, d_out, start, stop)
            d_total += d_product.sum(1, keepdim=True)
            d_modulated = fmap.repeat(modulate(d_product, tile.angle(queries)))
            d_state.baddbmm_(phi.transpose(1, 2), d_modulated)
            d_phi = torch.bmm(d_modulated, state.product.transpose(1, 2))
            collect.store_queries(queries, phi, d_phi, d_angle, start, stop)
        collect.add_smoothing(d_total, state.total)
        for start, stop in chunk_bounds(operands.k.shape[2], chunk):
            keys = tile.keys(start, stop)
            part = key_chunk(tile, keys, key_scores(tile, keys, start, stop), state.shift, start, stop)
            d_values, d_angle = modulate_vjp(part.values, fmap.merge(torch.bmm(part.phi, d_state)), part.angle)
            d_phi = torch.bmm(fmap.repeat(part.modulated()), d_state.transpose(1, 2))
            if tile.smoothing is not None:
                d_values += d_total * tile.smoothing
            collect.store_keys(part, d_phi, d_values, d_angle, start)
        collect.finish()
    return gradients.by_name
