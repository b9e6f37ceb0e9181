"""Absorb and read for an exponential map: two softmax attentions, with R frequencies between the sequences.

    log_scale_r = log sum_j exp(omega_r.k_j + b_j)      values_r = sum_j softmax_j(omega_r.k_j + b_j) v_j      absorb
    out_i = sum_r softmax_r(omega_r.q_i + log_scale_r + a_r) values_r                                          read

b is the keys' log-weight, a the frequencies'. This is Eq. 1 with its sums exchanged. No denominator is left. Sums are
relative to the log-scale, so that the weights of what is absorbed are 1; those of merged states need not be. Inside,
logarithms are to base 2: a power of two costs a third of an exponential.

With a simplex envelope, b_j loses log 1/R sum_r exp(omega_r.k_j): the scores are there already.

Backward makes the softmaxes again, chunk by chunk. With P a softmax and dP the gradient of its weights, the gradient of
its scores is P (dP - sum P dP), and the sum is d_out.out. The log-scale of what is absorbed counts as a constant: there
the sum is missing.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from klformer.ops.spectral_product.autograd import empty_results, empty_sums
from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.tiles import Cut, Scratch, Tile, chunk_bounds, tiles
from klformer.ops.spectral_product.operands import NO_KEY, Call

LOG2_E, LN_2 = math.log2(math.e), math.log(2)


def absorb(call: Call, cut: Cut) -> list[Tensor]:
    """Return the sums of keys and values; with a simplex envelope also that of every key to base 2, (B, H, S)."""
    assert call.k is not None
    sums, envelopes, length = empty_sums(call), empty_envelopes(call), call.k.shape[2]
    for tile in tiles(call, cut.rows):
        values, scratch = tile.room(sums.values), Scratch(tile, cut.chunk, call.num_projections, "scores")
        shift, mass = tile.new_zeros(1, call.num_projections), tile.new_zeros(call.num_projections)
        for start, stop in chunk_bounds(length, cut.chunk):
            keys, scores = _key_scores(tile, scratch, start, stop)
            bias = _log2_bias(tile, keys, start, stop)
            if envelopes:
                spare = Scratch(tile, cut.chunk, call.num_projections, "spare").tokens_first(stop - start)
                envelope = log2_sum(scores, spare).neg_().add_(math.log2(call.num_projections))
                tile.write(envelopes[0][:, :, start:stop], envelope.squeeze(-1))
                bias = envelope if bias is None else envelope + bias
            if bias is not None:
                scores += bias
            largest = scores.amax(1, keepdim=True).clamp_(min=NO_KEY)
            if start:
                torch.maximum(shift, largest, out=largest)
                factor = shift.sub_(largest).exp2_()
                mass.mul_(factor.squeeze(1))
                values.mul_(factor.transpose(1, 2))
                mass += scores.sub_(largest).exp2_().sum(1)
            else:
                mass = scores.sub_(largest).exp2_().sum(1)
            shift = largest
            values.baddbmm_(scores.transpose(1, 2), tile.values(start, stop), beta=1 if start else 0)
        no_key = mass == 0
        mass.masked_fill_(no_key, 1)
        tile.write(sums.values, values.div_(mass.unsqueeze(-1)) if length else values.zero_())
        tile.write(sums.weights, no_key.logical_not().to(mass.dtype))
        tile.write(sums.log_scale, shift.squeeze(1).add_(mass.log2_()).mul_(LN_2).masked_fill_(no_key, NO_KEY))
    return [*sums, *envelopes]


def empty_envelopes(call: Call) -> list[Tensor]:
    """Return room for the simplex envelope of every key, (B, H, S); nothing without one."""
    assert call.k is not None
    return [torch.empty(call.k.shape[:3], dtype=call.dtype, device=call.device)] if call.kernel.simplex else []


def absorb_backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Return the gradients of what was absorbed, and of what made features of it."""
    assert call.k is not None
    gradients, (_, _, log_scale, *envelopes) = Gradients(call, needed), outputs
    for tile in tiles(call, cut.rows):
        collect, scratches = TileGradients(tile, gradients), _scratches(tile, cut.chunk)
        d_values = tile.new_zeros(call.num_projections, call.value_dim)
        if d_results[0] is not None:
            d_values = tile.rows(d_results[0])
        d_weights = None if d_results[1] is None else tile.rows(d_results[1]).unsqueeze(1)
        reference = tile.rows(log_scale).mul(LOG2_E).unsqueeze(1)  # (n, 1, R)
        for start, stop in chunk_bounds(call.k.shape[2], cut.chunk):
            keys, weights = _key_scores(tile, scratches[0], start, stop)
            bias, shares = _log2_bias(tile, keys, start, stop), None
            if envelopes:
                weights += tile.rows(envelopes[0][:, :, start:stop]).unsqueeze(-1)
                shares = torch.exp2(weights, out=scratches[2].tokens_first(stop - start))  # times R
            if bias is not None:
                weights += bias
            weights.sub_(reference).exp2_()
            collect.store("v", start, stop, weights, d_values)
            d_scores = scratches[1].tokens_first(stop - start)
            torch.bmm(tile.values(start, stop), d_values.transpose(1, 2), out=d_scores)
            if d_weights is not None:
                d_scores += d_weights
            d_scores.mul_(weights)
            store_keys(collect, keys, d_scores, shares, start, stop)
        collect.finish()
    return gradients.by_name


def store_keys(
    collect: TileGradients, keys: Tensor, d_scores: Tensor, shares: Tensor | None, start: int, stop: int
) -> None:
    """Write the gradient of keys, given that of their scores (n, chunk, R), and add to those of parameters.

    Args:
        shares: With a simplex envelope R times the features of a key, which sum to one, (n, chunk, R).
    """
    tile, coefficient = collect.tile, collect.tile.call.kernel.norm_coefficient
    d_bias = None
    if collect.key_bias is not None or shares is not None or coefficient:
        d_bias = d_scores.sum(-1, keepdim=True)  # (n, chunk, 1)
        if collect.key_bias is not None:
            tile.add_to_keys(collect.key_bias, d_bias, start, stop)
    if shares is not None and d_bias is not None:
        d_scores.addcmul_(shares, d_bias, value=-1 / d_scores.shape[2])
    more = (keys, d_bias.mul_(-2 * coefficient)) if coefficient and d_bias is not None else None
    collect.store_inputs("k", start, stop, keys, d_scores, more=more)


def read(call: Call, cut: Cut) -> list[Tensor]:
    """Return the result of queries against sums, and its log-sums."""
    assert call.q is not None
    out, log_sums = empty_results(call)
    for tile in tiles(call, cut.rows):
        scratch, (mean, log_mass, _) = Scratch(tile, cut.chunk, call.num_projections, "scores"), _latents(tile)
        for start, stop in chunk_bounds(call.q.shape[2], cut.chunk):
            _, weights = _query_scores(tile, scratch, log_mass, start, stop)
            largest = weights.amax(-1, keepdim=True)
            total = weights.sub_(largest).exp2_().sum(-1, keepdim=True)
            tile.multiply_into(out[:, :, start:stop], weights, mean, divisor=total)
            log_sum = total.log2_().add_(largest).mul_(LN_2)
            log_sum.sub_(call.kernel.log_normaliser).masked_fill_(log_sum < NO_KEY / 2, -torch.inf)
            tile.write(log_sums[:, :, start:stop], log_sum.squeeze(-1))
    return [out, log_sums]


def read_backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Return the gradients of queries and sums, and of what made features of the queries."""
    assert call.q is not None
    gradients, (d_out, d_log_sum), rounded = Gradients(call, needed), d_results, outputs[0].dtype != call.dtype
    for tile in tiles(call, cut.rows):
        collect, scratches, (mean, log_mass, inverse) = (
            TileGradients(tile, gradients),
            _scratches(tile, cut.chunk),
            _latents(tile),
        )
        d_mean, d_log_mass = collect.room("values"), torch.zeros_like(log_mass)
        for start, stop in chunk_bounds(call.q.shape[2], cut.chunk):
            queries, weights = _query_scores(tile, scratches[0], log_mass, start, stop)
            log_sum = tile.rows(outputs[1][:, :, start:stop]).unsqueeze(-1)
            log_sum = log_sum.masked_fill(log_sum == -torch.inf, torch.inf)  # without any key all weights are 0
            weights.sub_(log_sum.add_(call.kernel.log_normaliser).mul_(LOG2_E)).exp2_()
            d_scores = scratches[1].tokens_first(stop - start)
            excess = None  # sum_r P_r dP_r of each query
            if d_out is None:
                d_scores.zero_()
            else:
                d_chunk = tile.chunk(d_out, start, stop)
                torch.bmm(d_chunk, mean.transpose(1, 2), out=d_scores)
                d_mean.baddbmm_(weights.transpose(1, 2), d_chunk, beta=1 if start else 0)
                # A result that was rounded is made again.
                result = torch.bmm(weights, mean) if rounded else tile.chunk(outputs[0], start, stop)
                excess = (d_chunk * result).sum(-1, keepdim=True)
            if d_log_sum is not None:
                d_here = tile.rows(d_log_sum[:, :, start:stop]).unsqueeze(-1)
                excess = d_here.neg() if excess is None else excess.sub_(d_here)
            if excess is not None:
                d_scores.sub_(excess)
            d_log_mass += d_scores.mul_(weights).sum(1, keepdim=True)
            collect.store_inputs("q", start, stop, queries, d_scores)
        if collect.frequency_bias is not None:
            collect.frequency_bias += d_log_mass
        if d_out is None or not call.q.shape[2]:
            d_mean.zero_()
        d_log_mass = d_log_mass.squeeze(1)
        d_weights = d_log_mass - (d_mean * mean).sum(-1)
        if inverse is not None:
            d_mean.mul_(inverse.unsqueeze(-1))
            d_weights *= inverse
        collect.write_sums(d_mean, d_weights, d_log_mass)
        collect.finish()
    return gradients.by_name


def _latents(tile: Tile) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the mean value of every frequency (n, R, E), the logarithm to base 2 of its weight in the score of a query
    (n, 1, R), and what its sums were divided by as a factor (n, R), 0 without any key; None for 1."""
    assert tile.call.sums is not None
    values, weights, log_scale = (tile.rows(x) for x in tile.call.sums)
    log_mass, inverse = log_scale.unsqueeze(1), None
    # Those of one absorb are 1. To look costs little, but for a GPU, which would have to be waited for.
    if not tile.call.just_absorbed and (weights.device.type != "cpu" or not bool((weights == 1).all())):
        no_key = weights == 0
        inverse = weights.masked_fill(no_key, 1).reciprocal_()
        values, log_mass = values * inverse.unsqueeze(-1), log_mass - inverse.log().unsqueeze(1)
        inverse.masked_fill_(no_key, 0)
    if tile.frequency_bias is not None:
        log_mass = log_mass + tile.frequency_bias
    return values, log_mass * LOG2_E, inverse


def key_scores(
    tile: Tile, scratch: Scratch, start: int, stop: int, spare: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys (n, chunk, D), their scores (n, chunk, R) to base 2 with the log-weights of the keys, and R times
    their features, which sum to one, with a simplex envelope; these overwrite `spare`."""
    keys, scores = _key_scores(tile, scratch, start, stop)
    shares, bias = None, _log2_bias(tile, keys, start, stop)
    if tile.call.kernel.simplex:
        scores -= log2_sum(scores, spare).sub_(math.log2(scores.shape[2]))
        shares = torch.exp2(scores, out=spare)
    return keys, scores if bias is None else scores.add_(bias), shares


def _key_scores(tile: Tile, scratch: Scratch, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return keys (n, chunk, D) and their scores (n, chunk, R) to base 2, without log-weights."""
    assert tile.omega is not None
    keys = tile.keys(start, stop)
    return keys, tile.project(keys, tile.omega * LOG2_E, scratch.tokens_first(stop - start))


def _query_scores(tile: Tile, scratch: Scratch, log_mass: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return queries (n, chunk, D) and their scores (n, chunk, R) to base 2."""
    assert tile.omega is not None
    queries = tile.queries(start, stop)
    return queries, tile.project(queries, tile.omega * LOG2_E, scratch.tokens_first(stop - start)).add_(log_mass)


def _log2_bias(tile: Tile, keys: Tensor, start: int, stop: int) -> Tensor | None:
    bias = tile.log_weights(keys, start, stop)
    return None if bias is None else bias * LOG2_E


def _scratches(tile: Tile, chunk: int) -> list[Scratch]:
    """Return memory for scores, their gradients, and one more."""
    uses = ("scores", "d_scores", *(("spare",) if tile.call.kernel.simplex else ()))
    return [Scratch(tile, chunk, tile.call.num_projections, use) for use in uses]


def log2_sum(scores: Tensor, spare: Tensor) -> Tensor:
    """Return log2 sum_r 2^scores of scores (n, length, R), (n, length, 1); `spare` is overwritten."""
    largest = scores.amax(-1, keepdim=True)
    return torch.sub(scores, largest, out=spare).exp2_().sum(-1, keepdim=True).log2_().add_(largest)
