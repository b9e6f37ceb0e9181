"""The linear-time product with a causal mask: chunks of the sequence with a carried state.

Within a chunk the scores are an ordinary (chunk, chunk) matrix under a triangular mask; everything before the chunk
is in the state. Forward keeps the state only once every CHUNKS_PER_CHECKPOINT chunks; backward goes through these
stretches from last to first, carrying the states forward again inside a stretch and the gradient of the state backward.

Exponential maps: a chunk's features refer to the largest key score up to the end of the chunk, feature by feature. A
key that stands late in the chunk and is larger by far than what came before would make the earlier ones underflow for
the earlier queries, which do not see it. That shows as a tiny denominator; such a chunk is cut in two and each half
done by itself, down to single tokens, where the denominator is at least 1. Backward uses the same cuts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.modulation import demodulate, modulate, modulate_vjp
from klformer.ops.steps import (
    NO_KEY,
    Attended,
    Carry,
    Gradients,
    ParameterGradients,
    Residuals,
    empty_gradients,
    empty_residuals,
    product_gradient,
    query_features,
    raise_shift,
    shift_queries,
    store_values,
)
from klformer.ops.tiling import Problem, Tile, chunk_bounds

CHUNKS_PER_CHECKPOINT = 16


def num_checkpoints(length: int, chunk: int) -> int:
    """States that forward keeps a row."""
    return -(-length // (chunk * CHUNKS_PER_CHECKPOINT))


def forward(problem: Problem, chunk: int) -> Residuals:
    """The normalised product of every query with the keys up to its own position."""
    length = problem.q.shape[2]
    saved = empty_residuals(problem, num_states=num_checkpoints(length, chunk))
    exponential = problem.feature_map.exponential
    if exponential:
        saved.starts = torch.zeros(saved.denominator.shape[:2], dtype=torch.bool, device=problem.q.device)
    for tile in problem.tiles(chunk):
        carry = Carry.before_first(tile)
        for index, (start, stop) in enumerate(chunk_bounds(length, chunk)):
            if index % CHUNKS_PER_CHECKPOINT == 0:
                saved.save_state(tile, carry, index // CHUNKS_PER_CHECKPOINT)
            pending = [(start, stop)]
            while pending:
                segment = pending.pop()
                advanced = _forward_segment(tile, carry, saved, *segment)
                if advanced is None:
                    middle = (segment[0] + segment[1]) // 2
                    pending += [(middle, segment[1]), (segment[0], middle)]
                    continue
                carry = advanced
                if exponential:
                    saved.starts[tile.rows, segment[0]] = True
    return saved


def _forward_segment(tile: Tile, carry: Carry, saved: Residuals, start: int, stop: int) -> Carry | None:
    """Write the results of a segment and return what comes after it; None, changing nothing, if it must be cut."""
    problem, fmap = tile.problem, tile.problem.feature_map
    keys, values, queries = tile.keys(start, stop), tile.values(start, stop), tile.queries(start, stop)
    key_scores = tile.key_scores(keys, start, stop)
    query_scores = fmap.scores(queries, tile.omega)
    state, shift, query_shift = carry.state, carry.shift, None
    if fmap.exponential:
        state = state.clone()
        shift = raise_shift(shift, key_scores, state)
        key_scores -= shift
        query_shift = shift_queries(query_scores, shift)
    phi_k, phi_q = fmap.features(key_scores), fmap.features(query_scores)
    modulated = modulate(values, tile.angle(keys))
    scores = fmap.merge(torch.bmm(phi_q, phi_k.transpose(1, 2))).tril_()
    product = fmap.merge(torch.bmm(phi_q, state)).baddbmm_(scores, modulated)
    product, slope = demodulate(product, tile.angle(queries))
    if problem.smoothing:
        product.add_(values.cumsum(1).add_(carry.total), alpha=problem.smoothing)
    attended = Attended.divide(product, slope, query_shift)
    if fmap.exponential and stop - start > 1 and _underflowed(tile, carry, attended.denominator, start, stop):
        return None
    attended.store(saved, tile, start, stop)
    total = carry.total + values.sum(1, keepdim=True) if problem.smoothing else carry.total
    state.baddbmm_(phi_k.transpose(1, 2), fmap.repeat(modulated))
    return Carry(state=state, total=total, shift=shift)


def _underflowed(tile: Tile, carry: Carry, denominator: Tensor, start: int, stop: int) -> bool:
    """Whether a query that has a key got so small a denominator that terms of it may have been lost."""
    tiny = denominator < torch.finfo(denominator.dtype).tiny ** 0.5
    dropped = tile.dropped(start, stop)
    if dropped is not None:
        tiny &= (carry.shift[..., :1] > NO_KEY) | (~dropped).cumsum(1).bool()
    return bool(tiny.any())


@dataclass
class _Segment:
    """A segment of the stretch that backward is in: its features of keys and what was carried into it."""

    start: int
    stop: int
    keys: Tensor
    phi_k: Tensor
    state: Tensor  # of the keys before the segment, referring to this segment's shift
    shift: Tensor
    rescale: Tensor | None  # exp(shift before - shift of this segment), (n, R, 1)


def backward(problem: Problem, d_out: Tensor, saved: Residuals, chunk: int, need_omega: bool) -> Gradients:
    """Gradients of the operands; that of the frequencies only where it is needed."""
    grads = empty_gradients(problem, need_omega)
    length, stretch = problem.q.shape[2], chunk * CHUNKS_PER_CHECKPOINT
    for tile in problem.tiles(chunk):
        collect = ParameterGradients(tile, need_omega)
        d_state = torch.zeros_like(Carry.before_first(tile).state)
        d_total = d_state.new_zeros(tile.num_rows, 1, problem.v.shape[-1] + 1)
        for index in reversed(range(num_checkpoints(length, chunk))):
            bounds = list(_segment_bounds(saved, tile, index * stretch, min((index + 1) * stretch, length), chunk))
            for segment in reversed(_segments_of_stretch(tile, saved, index, bounds)):
                _backward_segment(tile, segment, d_out, saved, d_state, d_total, collect, grads)
        collect.finish(grads)
    return grads


def _segment_bounds(saved: Residuals, tile: Tile, start: int, stop: int, chunk: int) -> Iterator[tuple[int, int]]:
    """The segments that forward worked in between two positions."""
    if not tile.problem.feature_map.exponential:
        for first, last in chunk_bounds(stop - start, chunk):
            yield start + first, start + last
        return
    starts = saved.starts[tile.rows.start, start:stop].nonzero().flatten().add_(start).tolist()
    yield from zip(starts, [*starts[1:], stop], strict=True)


def _segments_of_stretch(tile: Tile, saved: Residuals, index: int, bounds: list[tuple[int, int]]) -> list[_Segment]:
    """Carry the state forward through a stretch again, from its checkpoint."""
    problem = tile.problem
    state, shift = saved.load_state(tile, index)
    segments = []
    for start, stop in bounds:
        keys = tile.keys(start, stop)
        scores = tile.key_scores(keys, start, stop)
        rescale = None
        if problem.feature_map.exponential:
            raised = raise_shift(shift, scores, state)
            rescale = (shift - raised).exp_().transpose(1, 2)
            shift = raised
            scores -= shift
        phi_k = problem.feature_map.features(scores)
        segments.append(_Segment(start, stop, keys, phi_k, state.clone(), shift, rescale))
        modulated = modulate(tile.values(start, stop), tile.angle(keys))
        state.baddbmm_(phi_k.transpose(1, 2), problem.feature_map.repeat(modulated))
    return segments


def _backward_segment(
    tile: Tile,
    segment: _Segment,
    d_out: Tensor,
    saved: Residuals,
    d_state: Tensor,
    d_total: Tensor,
    collect: ParameterGradients,
    grads: Gradients,
) -> None:
    """Gradients of one segment. `d_state` and `d_total` come as those of what it carries out, and leave as those of
    what is carried in."""
    fmap, start, stop = tile.problem.feature_map, segment.start, segment.stop
    keys, phi_k = segment.keys, segment.phi_k
    values, queries = tile.values(start, stop), tile.queries(start, stop)
    key_angle, query_angle = tile.angle(keys), tile.angle(queries)
    phi_q = query_features(tile, queries, segment.shift, saved.query_shift[tile.rows, start:stop])
    modulated = modulate(values, key_angle)
    d_product, d_query_angle = product_gradient(tile, d_out, saved, start, stop)
    d_modulated = modulate(d_product, query_angle)

    scores = fmap.merge(torch.bmm(phi_q, phi_k.transpose(1, 2))).tril_()
    d_scores = torch.bmm(d_modulated, modulated.transpose(1, 2)).tril_()
    d_weighted = fmap.merge(torch.bmm(phi_k, d_state)).baddbmm_(scores.transpose(1, 2), d_modulated)
    d_modulated, modulated, d_scores = (fmap.repeat(x) for x in (d_modulated, modulated, d_scores))
    d_phi_q = torch.bmm(d_modulated, segment.state.transpose(1, 2)).baddbmm_(d_scores, phi_k)
    d_phi_k = torch.bmm(modulated, d_state.transpose(1, 2)).baddbmm_(d_scores.transpose(1, 2), phi_q)
    d_values, d_key_angle = modulate_vjp(values, d_weighted, key_angle)
    if tile.problem.smoothing:
        # Every key is in the totals of its own and all later queries.
        later = d_product.sum(1, keepdim=True)
        d_values.add_(d_product - d_product.cumsum(1) + later + d_total, alpha=tile.problem.smoothing)
        d_total += later

    d_state.baddbmm_(phi_q.transpose(1, 2), d_modulated)
    if segment.rescale is not None:
        d_state.mul_(segment.rescale)
    collect.store_queries(grads.q, queries, fmap.vjp(phi_q, d_phi_q), d_query_angle, start, stop)
    collect.store_keys(grads.k, keys, fmap.vjp(phi_k, d_phi_k), d_key_angle, start, stop)
    store_values(tile, grads.v, d_values, start, stop)
