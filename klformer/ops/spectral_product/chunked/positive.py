"""Bidirectional product of an exponential map as two softmax attentions, with R frequencies between the sequences.

    log_mass_r = log sum_j exp(omega_r.k_j + b_j)       mean_r = sum_j softmax_j(omega_r.k_j + b_j) v_j
    out_i = sum_r softmax_r(omega_r.q_i + log_mass_r + a_r) mean_r

b is the keys' log-weight, a the frequencies'. This is Eq. 1 with its sums exchanged. No denominator is left. All
logarithms are to base 2, which is folded into the frequencies and the log-weights: a power of two costs half of an
exponential.

A softmax takes any shift of its scores that is neither too small nor too large. To find the largest score and subtract
it are two passes over all scores; so it is guessed, and goes into the product that makes them, as one more column. A
query's shift is the mean of its scores: frequencies without their mean, and no column at all. A frequency's is the
largest score of the first chunk of keys. Both are below the largest, so that no sum underflows. Sums that grow too
large are looked for at the end; a tile where they do is done again with its largest scores.

With a simplex envelope, b_j loses log sum_r exp(omega_r.k_j): the scores are there already.

Forward keeps the state (mean, log_mass), the log-sum of every query, and the keys' log-weights where they are made
here. Backward makes the softmaxes again, chunk by chunk. With P a softmax and dP the gradient of its weights, the
gradient of its scores is P (dP - sum P dP); the sum is that of d_out out, one number a row, and goes into the product
that makes dP as one more column.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.tiling import (
    Cut,
    Scratch,
    Tile,
    chunk_bounds,
    multiply_into,
    tiles,
    with_column,
)
from klformer.ops.spectral_product.key_values import NO_KEY
from klformer.ops.spectral_product.operands import SpectralOperands

LOG2_E = math.log2(math.e)
#: Sums that a guessed shift leads to are below two to the power of this; values may be as large before they overflow.
MAX_LOG_SUM = 60.0


@dataclass
class Residuals:
    """The result, and what backward needs besides the operands. Rows are (batch, head) pairs, B * H of them."""

    out: Tensor  # (B, H, L, E)
    mean: Tensor  # (B * H, R, E)
    log_mass: Tensor  # (B * H, 1, R)
    log_sum: Tensor  # (B * H, L, 1), of the scores of each query
    key_bias: Tensor  # (B * H, S, 1) with a simplex envelope, otherwise S = 0

    @staticmethod
    def empty(operands: SpectralOperands) -> "Residuals":
        batch, heads, length, _ = operands.q.shape
        rows, num_values, num_frequencies = batch * heads, operands.v.shape[-1], operands.num_projections

        def empty(*shape: int, dtype: torch.dtype = operands.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=operands.q.device)

        return Residuals(
            out=empty(batch, heads, length, num_values, dtype=operands.v.dtype),
            mean=empty(rows, num_frequencies, num_values),
            log_mass=empty(rows, 1, num_frequencies),
            log_sum=empty(rows, length, 1),
            key_bias=empty(rows, operands.k.shape[2] if operands.kernel.simplex else 0, 1),
        )

    def as_list(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


class Scores:
    """Scores of a tile's chunks, (n, chunk, R) to base 2, log-weights and shifts included: one product each."""

    def __init__(self, tile: Tile, chunk: int) -> None:
        assert tile.omega is not None
        self._tile, self._scratch = tile, Scratch(tile, chunk, tile.omega.shape[1], "scores")
        self._omega = tile.omega * LOG2_E

    def of_keys(self, start: int, stop: int, bias: Tensor | None, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys (n, chunk, D) and their scores, with log-weights (n, S, 1) and less a shift (n, 1, R)."""
        keys = self._tile.keys(start, stop)
        left: list[Tensor | float] = [] if bias is None else [bias[:, start:stop]]
        right: list[Tensor | float] = [] if bias is None else [1.0]
        if shift is not None:
            left, right = [*left, 1.0], [*right, -shift.transpose(1, 2)]
        return keys, self._multiply(with_column(keys, *left, use="tokens"), with_column(self._omega, *right))

    def of_queries(
        self, start: int, stop: int, with_mass: Tensor, log_sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries (n, chunk, D) and their scores, less their log-sums (n, L, 1) where these are known; `with_mass` is
        what `with_log_mass` gives."""
        queries = self._tile.queries(start, stop)
        if log_sums is None:
            return queries, self._multiply(with_column(queries, 1.0, use="tokens"), with_mass)
        left = with_column(queries, 1.0, -log_sums[:, start:stop], use="tokens")
        return queries, self._multiply(left, with_column(with_mass, 1.0))

    def with_log_mass(self, log_mass: Tensor) -> Tensor:
        """Frequencies and, as one more column, what a query's score has besides the projection: (n, R, D + 1). Less
        their mean, which shifts the scores of a query by theirs."""
        bias = self._tile.frequency_bias
        column = log_mass if bias is None else log_mass + bias * LOG2_E
        columns = with_column(self._omega, column.transpose(1, 2))
        return columns - columns.mean(1, keepdim=True)

    def _multiply(self, x: Tensor, omega: Tensor) -> Tensor:
        return torch.bmm(x, omega.transpose(1, 2), out=self._scratch.tokens_first(x.shape[1]))


def log_sum(scores: Tensor, spare: Tensor) -> Tensor:
    """log2 sum_r 2^scores of scores (n, length, R), (n, length, 1); `spare` is overwritten."""
    largest = scores.amax(-1, keepdim=True)
    return torch.sub(scores, largest, out=spare).exp2_().sum(-1, keepdim=True).log2_().add_(largest)


def log2_bias(tile: Tile) -> Tensor | None:
    """The keys' log-weights to base 2, (n, S, 1), -inf for padding; None where all are 0 and there."""
    bias = tile.log_weights()
    return None if bias is None else bias * LOG2_E


def empty(operands: SpectralOperands) -> list[Tensor]:
    """Room for what `forward` gives."""
    return Residuals.empty(operands).as_list()


def forward(operands: SpectralOperands, cut: Cut) -> list[Tensor]:
    """The result, and what backward needs."""
    saved = Residuals.empty(operands)
    # A GPU would have to be waited for, to learn whether a guess was good.
    guess = operands.q.device.type == "cpu" and not operands.kernel.simplex
    for tile in tiles(operands, cut.rows):
        scores = Scores(tile, cut.chunk)
        state = _guessed(tile, scores, cut.chunk) if guess else None
        if state is None:
            state = normalised(*add_up_keys(tile, scores, cut.chunk, saved.key_bias[tile.rows]))
        saved.mean[tile.rows], saved.log_mass[tile.rows] = state
        if not (guess and read_queries(tile, scores, cut.chunk, saved, exact=False)):
            read_queries(tile, scores, cut.chunk, saved)
    return saved.as_list()


def _guessed(tile: Tile, scores: Scores, chunk: int) -> tuple[Tensor, Tensor] | None:
    """What `add_up_keys` and `normalised` give, with shifts from the first chunk of keys; None if these do not do."""
    operands, bias, shift = tile.operands, log2_bias(tile), None
    mean = tile.new_zeros(operands.num_projections, operands.v.shape[-1])
    mass = tile.new_zeros(1, operands.num_projections)
    for start, stop in chunk_bounds(operands.k.shape[2], chunk):
        _, weights = scores.of_keys(start, stop, bias, shift)
        if shift is None:
            shift = weights.amax(1, keepdim=True)
            if not bool((shift > -torch.inf).all()):  # a row begins with nothing but padding
                return None
            weights.sub_(shift)
        mass += weights.exp2_().sum(1, keepdim=True)
        mean.baddbmm_(weights.transpose(1, 2), tile.values(start, stop))
    if shift is None or not bool((mass < 2.0**MAX_LOG_SUM).all()) or not _is_finite(mean):
        return None
    return mean.div_(mass.transpose(1, 2)), shift.add_(mass.log2_())


def _is_finite(x: Tensor) -> bool:
    """Whether all numbers are; a sum that is not finite says no as well, which costs time and nothing else."""
    return bool(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite())


def add_up_keys(tile: Tile, scores: Scores, chunk: int, key_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Read all keys and values into the frequencies: the weighted values (n, R, E) and weights (n, 1, R), relative to
    the largest score of each frequency, (n, 1, R).

    Args:
        key_bias: With a simplex envelope the keys' log-weights are written to it, (n, S, 1).
    """
    operands, bias = tile.operands, log2_bias(tile)
    sums = tile.new_zeros(operands.num_projections, operands.v.shape[-1])
    mass = tile.new_zeros(1, operands.num_projections)
    shift = torch.full_like(mass, NO_KEY)
    spare = Scratch(tile, chunk, operands.num_projections, "spare") if operands.kernel.simplex else None
    for start, stop in chunk_bounds(operands.k.shape[2], chunk):
        if spare is None:
            _, weights = scores.of_keys(start, stop, bias)
        else:
            _, weights = scores.of_keys(start, stop, None)
            envelope = log_sum(weights, spare.tokens_first(stop - start)).neg_()
            key_bias[:, start:stop] = envelope if bias is None else envelope + bias[:, start:stop]
            weights += key_bias[:, start:stop]
        raised = torch.maximum(shift, weights.amax(1, keepdim=True))
        factor = shift.sub_(raised).exp2_()
        shift = raised
        weights.sub_(shift).exp2_()
        mass.mul_(factor).add_(weights.sum(1, keepdim=True))
        sums.mul_(factor.transpose(1, 2)).baddbmm_(weights.transpose(1, 2), tile.values(start, stop))
    return sums, mass, shift


def normalised(sums: Tensor, mass: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """mean (n, R, E) and log_mass (n, 1, R) of what keys add up to; 0 and 0 without any key."""
    no_key = mass == 0
    mass = mass.masked_fill(no_key, 1)
    return sums / mass.transpose(1, 2), shift.masked_fill(no_key, 0).add_(mass.log2())


def read_queries(tile: Tile, scores: Scores, chunk: int, saved: Residuals, *, exact: bool = True) -> bool:
    """Write the results of all queries and their log-sums, given the state in `saved`.

    Args:
        exact: Take the largest score of each query as its shift; otherwise its mean, which `with_log_mass` has in it.

    Returns:
        Whether the results can be used; always, if `exact`.
    """
    mean, with_mass = saved.mean[tile.rows], scores.with_log_mass(saved.log_mass[tile.rows])
    out, log_sums = saved.out.flatten(0, 1)[tile.rows], saved.log_sum[tile.rows]
    for start, stop in chunk_bounds(tile.operands.q.shape[2], chunk):
        _, weights = scores.of_queries(start, stop, with_mass)
        largest = weights.amax(-1, keepdim=True) if exact else None
        if largest is not None:
            weights.sub_(largest)
        total = weights.exp2_().sum(-1, keepdim=True)
        multiply_into(out[:, start:stop], weights, mean, divisor=total)
        log_sum = total.log2_()
        log_sums[:, start:stop] = log_sum if largest is None else log_sum.add_(largest)
    return exact or (bool((log_sums < MAX_LOG_SUM).all()) and _is_finite(out))


def backward(
    operands: SpectralOperands, saved_list: list[Tensor], d_out: Tensor, needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Gradients of the operands that are needed."""
    gradients, saved = Gradients(operands, needed), Residuals(*saved_list)
    for tile in tiles(operands, cut.rows):
        collect = TileGradients(tile, gradients)
        scores, d_scratch = Scores(tile, cut.chunk), Scratch(tile, cut.chunk, operands.num_projections, "d_scores")
        d_mean, d_log_mass = backward_queries(tile, collect, scores, d_scratch, saved, d_out, cut.chunk)
        log_mass, key_bias = saved.log_mass[tile.rows], saved.key_bias[tile.rows]
        offset = offset_of(d_mean, d_log_mass, saved.mean[tile.rows])
        backward_keys(tile, collect, scores, d_scratch, log_mass, key_bias, d_mean, offset, cut.chunk)
        collect.finish()
    return gradients.by_name


def offset_of(d_mean: Tensor, d_log_mass: Tensor, mean: Tensor) -> Tensor:
    """What the gradient of a key's weight has besides v.d_mean, (n, R, 1)."""
    return d_log_mass.transpose(1, 2) - (d_mean * mean).sum(-1, keepdim=True)


def backward_queries(
    tile: Tile,
    collect: TileGradients,
    scores: Scores,
    d_scratch: Scratch,
    saved: Residuals,
    d_out: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of queries; returns those of the state, (n, R, E) and (n, 1, R)."""
    mean, log_mass = saved.mean[tile.rows], saved.log_mass[tile.rows]
    with_mass, mean_and_one = scores.with_log_mass(log_mass), with_column(mean, 1.0)
    d_mean, d_log_mass = torch.zeros_like(mean), torch.zeros_like(log_mass)
    for start, stop in chunk_bounds(tile.operands.q.shape[2], chunk):
        queries, weights = scores.of_queries(start, stop, with_mass, saved.log_sum[tile.rows])
        weights.exp2_()
        d_chunk = tile.chunk(d_out, start, stop)
        average = (d_chunk * tile.chunk(saved.out, start, stop)).sum(-1, keepdim=True)
        d_scores = d_scratch.tokens_first(stop - start)
        left = with_column(d_chunk, -average, use="tokens")
        torch.bmm(left, mean_and_one.transpose(1, 2), out=d_scores).mul_(weights)
        d_mean.baddbmm_(weights.transpose(1, 2), d_chunk)
        d_log_mass += d_scores.sum(1, keepdim=True)
        _store(collect, "q", queries, d_scores, start, stop)
    if collect.frequency_bias is not None:
        collect.frequency_bias += d_log_mass
    return d_mean, d_log_mass


def backward_keys(
    tile: Tile,
    collect: TileGradients,
    scores: Scores,
    d_scratch: Scratch,
    reference: Tensor,
    key_bias: Tensor,
    d_mean: Tensor,
    offset: Tensor,
    chunk: int,
) -> None:
    """Write the gradients of keys and values.

    Args:
        reference: What the weights of keys are relative to, (n, 1, R): log_mass, or the shift of sums.
        key_bias: (n, S, 1), with a simplex envelope.
        d_mean: Gradient of the weighted values (n, R, E).
        offset: What the gradient of a weight has besides v.d_mean, (n, R, 1).
    """
    operands, simplex = tile.operands, tile.operands.kernel.simplex
    bias = key_bias if simplex else log2_bias(tile)
    # The gradient of the envelope is taken from that of a weight. A key's features are its weights times the masses, if
    # its log-weight is the envelope alone.
    alone = simplex and operands.key_bias is None
    d_state = with_column(d_mean, offset, reference.exp2().transpose(1, 2)) if alone else with_column(d_mean, offset)
    spare = Scratch(tile, chunk, operands.num_projections, "spare") if simplex and not alone else None
    for start, stop in chunk_bounds(operands.k.shape[2], chunk):
        shares = None
        if spare is not None:
            own = scores.of_keys(start, stop, None)[1]
            shares = torch.softmax(own.mul_(math.log(2)), -1, out=spare.tokens_first(stop - start))
        keys, weights = scores.of_keys(start, stop, bias, reference)
        weights.exp2_()
        values = tile.values(start, stop)
        d_scores = d_scratch.tokens_first(stop - start)
        columns = with_column(values, 1.0, use="tokens")
        if alone:
            d_values = torch.bmm(weights, d_mean)
            collect.write("v", start, stop, d_values)
            # Of the log-weight, known before the gradient of the scores, of which it is the sum.
            by_offset = torch.mul(weights, offset.transpose(1, 2), out=d_scores).sum(-1, keepdim=True)
            columns = with_column(columns, by_offset.add_(d_values.mul_(values).sum(-1, keepdim=True)).neg_())
        else:
            collect.store("v", start, stop, weights, d_mean)
        torch.bmm(columns, d_state.transpose(1, 2), out=d_scores).mul_(weights)
        if collect.key_bias is not None or shares is not None:
            d_bias = d_scores.sum(-1, keepdim=True)
            if collect.key_bias is not None:
                collect.key_bias[:, start:stop] = d_bias
            if shares is not None:
                d_scores.addcmul_(shares, d_bias, value=-1)
        _store(collect, "k", keys, d_scores, start, stop)


def _store(collect: TileGradients, name: str, x: Tensor, d_scores: Tensor, start: int, stop: int) -> None:
    """Write the gradient of a chunk of queries or keys, and add to that of the frequencies."""
    assert collect.tile.omega is not None
    collect.store(name, start, stop, d_scores, collect.tile.omega)
    if collect.omega is not None:
        collect.omega.baddbmm_(d_scores.transpose(1, 2), x)
