"""The product in two halves: keys and values into sums, and queries against sums that may come from elsewhere.

    absorb    state = sum_j 2^(u_j - shift) [v_j, 1]^T, the sums of `block.Carried`, of the keys that are here
    read      out = the quotient of state phi(q), whoever's keys the state is of

`positive` and `plain` do the same in one call, and their parts are used here. Between the halves sums of several parts
of a sequence are brought together. The causal product takes such sums as what came before (`causal`).

Gradients of shifts are never asked for: they cancel, and count as constants.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked import plain, positive
from klformer.ops.spectral_product.chunked.block import Carried
from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.tiling import Cut, Scratch, Tile, tiles
from klformer.ops.spectral_product.key_values import NO_KEY
from klformer.ops.spectral_product.operands import SpectralOperands


def empty_sums(operands: SpectralOperands) -> Carried:
    """Room for the sums of all rows. Without smoothing the total has no entries, without log-weights the shift."""
    rows = operands.q.shape[0] * operands.q.shape[1]
    num_totals = 0 if operands.kernel.smoothing is None else operands.v.shape[-1] + 1

    def empty(*shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=operands.dtype, device=operands.q.device)

    return Carried(
        empty(operands.value_columns, operands.num_features), empty(num_totals, 1), empty(1, operands.num_shifts)
    )


def absorb(operands: SpectralOperands, cut: Cut) -> tuple[Carried, Tensor]:
    """The sums of the keys, and their log-weights (B * H, S, 1) where a simplex envelope makes them."""
    sums = empty_sums(operands)
    num_keys = operands.k.shape[2] if operands.kernel.simplex else 0
    key_bias = sums.state.new_empty(sums.state.shape[0], num_keys, 1)
    for tile in tiles(operands, cut.rows):
        rows = tile.rows
        if operands.feature_map.exponential:
            scores = positive.Scores(tile, cut.chunk)
            values, mass, sums.shift[rows] = positive.add_up_keys(tile, scores, cut.chunk, key_bias[rows])
            sums.state[rows] = torch.cat([values.transpose(1, 2), mass], dim=1)
            continue
        features = plain.Features(tile, cut.chunk)
        nothing_kept = sums.state.new_empty(tile.num_rows, operands.num_features, 0)
        sums.state[rows], total = plain.add_up_keys(tile, features, cut.chunk, nothing_kept)
        if tile.smoothing is not None:
            sums.total[rows] = total
        if operands.num_shifts:
            sums.shift[rows] = _largest_log_weight(tile)
    return sums, key_bias


def _largest_log_weight(tile: Tile) -> Tensor:
    """What the weights of a map that is not exponential are relative to, (n, 1, 1)."""
    bias = tile.log_weights()
    if bias is None or not bias.shape[1]:
        return tile.new_zeros(1, 1).fill_(NO_KEY)
    return bias.amax(1, keepdim=True).clamp_(min=NO_KEY)


def absorb_backward(
    operands: SpectralOperands, shift: Tensor, key_bias: Tensor, d_sums: Carried, needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Gradients of keys, values and what makes features of them, given that of the sums, which refer to
    `shift`."""
    gradients = Gradients(operands, needed)
    for tile in tiles(operands, cut.rows):
        rows, collect, d_state = tile.rows, TileGradients(tile, gradients), d_sums.state[tile.rows]
        if operands.feature_map.exponential:
            scores = positive.Scores(tile, cut.chunk)
            scratch = Scratch(tile, cut.chunk, operands.num_projections, "d_scores")
            d_values, d_mass = d_state[:, :-1].transpose(1, 2), d_state[:, -1:].transpose(1, 2)
            positive.backward_keys(
                tile, collect, scores, scratch, shift[rows], key_bias[rows], d_values, d_mass, cut.chunk
            )
        else:
            features = plain.Features(tile, cut.chunk)
            scratch = Scratch(tile, cut.chunk, operands.num_features, "d_features")
            d_total = None if tile.smoothing is None else d_sums.total[rows]
            nothing_kept = d_state.new_empty(tile.num_rows, operands.num_features, 0)
            plain.backward_keys(tile, collect, features, scratch, nothing_kept, d_state, d_total, cut.chunk)
        collect.finish()
    return gradients.by_name


def read(operands: SpectralOperands, sums: Carried, cut: Cut) -> tuple[Tensor, Tensor]:
    """The result (B, H, L, E), and what each query was divided by, as it is kept for backward."""
    exponential = operands.feature_map.exponential
    saved = _positive(operands, sums) if exponential else _plain(operands, sums)
    for tile in tiles(operands, cut.rows):
        if isinstance(saved, positive.Residuals):
            positive.read_queries(tile, positive.Scores(tile, cut.chunk), cut.chunk, saved)
        else:
            plain.read_queries(tile, plain.Features(tile, cut.chunk), cut.chunk, saved)
    return saved.out, saved.log_sum if isinstance(saved, positive.Residuals) else saved.denominator


def read_backward(
    operands: SpectralOperands,
    sums: Carried,
    out: Tensor,
    divisor: Tensor,
    d_out: Tensor,
    needed: Collection[str],
    cut: Cut,
) -> tuple[dict[str, Tensor], Carried]:
    """Gradients of queries and what makes features of them, and of the sums."""
    gradients = Gradients(operands, needed)
    d_sums = Carried(torch.empty_like(sums.state), torch.empty_like(sums.total), sums.shift)
    exponential = operands.feature_map.exponential
    saved = _positive(operands, sums) if exponential else _plain(operands, sums)
    saved.out = out
    for tile in tiles(operands, cut.rows):
        rows, collect = tile.rows, TileGradients(tile, gradients)
        if isinstance(saved, positive.Residuals):
            saved.log_sum = divisor
            scores = positive.Scores(tile, cut.chunk)
            scratch = Scratch(tile, cut.chunk, operands.num_projections, "d_scores")
            d_mean, d_log_mass = positive.backward_queries(tile, collect, scores, scratch, saved, d_out, cut.chunk)
            mass = sums.state[rows, -1:]
            no_key = mass == 0
            inverse = mass.masked_fill(no_key, 1).reciprocal().masked_fill(no_key, 0)  # (n, 1, R)
            offset = positive.offset_of(d_mean, d_log_mass, saved.mean[rows])
            d_sums.state[rows] = torch.cat([d_mean, offset], dim=-1).transpose(1, 2) * inverse
        else:
            saved.denominator = divisor
            features = plain.Features(tile, cut.chunk)
            uses = ("d_features",) if tile.pair_offset is None else ("d_features", "d_features of sines")
            scratches = [Scratch(tile, cut.chunk, operands.num_features, use) for use in uses]
            d_state, d_total = plain.backward_queries(tile, collect, features, scratches, saved, d_out, cut.chunk)
            d_sums.state[rows] = d_state
            if tile.smoothing is not None:
                d_sums.total[rows] = d_total
        collect.finish()
    return gradients.by_name, d_sums


def _positive(operands: SpectralOperands, sums: Carried) -> positive.Residuals:
    """The sums as `positive` keeps them, and room for results."""
    saved = positive.Residuals.empty(operands)
    values, mass = sums.state[:, :-1].transpose(1, 2), sums.state[:, -1:]
    saved.mean, saved.log_mass = positive.normalised(values, mass, sums.shift)
    return saved


def _plain(operands: SpectralOperands, sums: Carried) -> plain.Residuals:
    """The sums as `plain` keeps them, and room for results."""
    saved = plain.Residuals.empty(operands, keep=False)
    saved.state = sums.state
    if operands.kernel.smoothing is not None:
        saved.total = sums.total
    return saved
