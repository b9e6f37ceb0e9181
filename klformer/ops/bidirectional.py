"""The linear-time product without a causal mask: all keys into a state, then every query against it.

    state = sum_s phi(k_s) [v_s, 1]^T            (F, W), the size of the feature space, not of the sequence
    [numerator, denominator] = phi(q) state

Forward keeps the state and the denominators; backward makes the features again, chunk by chunk. Exponential maps are
stabilised exactly: keys' scores lose their maximum over all keys, feature by feature (a running one, the state being
rescaled as it rises); queries' scores gain it and lose their own maximum. Both cancel in the quotient, every feature
is in (0, 1], and the denominator is at least 1. The maxima are constants for the gradient, because the quotient does
not depend on them.
"""

import torch
from torch import Tensor

from klformer.ops.modulation import modulate, modulate_vjp
from klformer.ops.steps import (
    Carry,
    Gradients,
    ParameterGradients,
    Residuals,
    empty_gradients,
    empty_residuals,
    key_features,
    product_gradient,
    query_features,
    store_values,
)
from klformer.ops.tiling import Problem, chunk_bounds


def forward(problem: Problem, chunk: int) -> Residuals:
    """The normalised product of every query with all keys."""
    saved = empty_residuals(problem, num_states=1)
    for tile in problem.tiles(chunk):
        carry = Carry.before_first(tile)
        for start, stop in chunk_bounds(problem.k.shape[2], chunk):
            carry.absorb(tile, start, stop)
        saved.save_state(tile, carry)
        for start, stop in chunk_bounds(problem.q.shape[2], chunk):
            carry.attend(tile, tile.queries(start, stop)).store(saved, tile, start, stop)
    return saved


def backward(problem: Problem, d_out: Tensor, saved: Residuals, chunk: int, need_omega: bool) -> Gradients:
    """Gradients of the operands; that of the frequencies only where it is needed."""
    grads, fmap = empty_gradients(problem, need_omega), problem.feature_map
    for tile in problem.tiles(chunk):
        collect = ParameterGradients(tile, need_omega)
        state, shift = saved.load_state(tile)
        d_state = torch.zeros_like(state)
        d_total = state.new_zeros(tile.num_rows, 1, problem.v.shape[-1] + 1)
        for start, stop in chunk_bounds(problem.q.shape[2], chunk):
            queries = tile.queries(start, stop)
            phi = query_features(tile, queries, shift, saved.query_shift[tile.rows, start:stop])
            d_product, d_angle = product_gradient(tile, d_out, saved, start, stop)
            d_total += d_product.sum(1, keepdim=True)
            d_modulated = fmap.repeat(modulate(d_product, tile.angle(queries)))
            d_state.baddbmm_(phi.transpose(1, 2), d_modulated)
            d_scores = fmap.vjp(phi, torch.bmm(d_modulated, state.transpose(1, 2)))
            collect.store_queries(grads.q, queries, d_scores, d_angle, start, stop)
        for start, stop in chunk_bounds(problem.k.shape[2], chunk):
            keys, values = tile.keys(start, stop), tile.values(start, stop)
            angle = tile.angle(keys)
            phi = key_features(tile, keys, shift, start, stop)
            d_values, d_angle = modulate_vjp(values, fmap.merge(torch.bmm(phi, d_state)), angle)
            modulated = fmap.repeat(modulate(values, angle))
            d_scores = fmap.vjp(phi, torch.bmm(modulated, d_state.transpose(1, 2)))
            if problem.smoothing:
                d_values.add_(d_total, alpha=problem.smoothing)
            collect.store_keys(grads.k, keys, d_scores, d_angle, start, stop)
            store_values(tile, grads.v, d_values, start, stop)
        collect.finish(grads)
    return grads
