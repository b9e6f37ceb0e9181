"""The linear-time product with a causal mask: chunks of the sequence with a carried state.

Within a chunk the scores are an ordinary (chunk, chunk) matrix under a triangular mask; everything before the chunk
is in the state. Forward keeps the state only once every CHUNKS_PER_CHECKPOINT chunks; backward goes through these
stretches from last to first, carrying the states forward again inside a stretch and the gradient of the state backward.

Exponential maps: a chunk's features refer to the largest key score up to the end of the chunk, feature by feature. A
key that stands late in the chunk and is larger by far than what came before would make the earlier ones underflow for
the earlier queries, which do not see it. That shows as a tiny denominator; such a chunk is cut in two and each half
done by itself, down to single tokens, where the denominator is at least 1. The log-weights of keys of other maps are
treated alike: a chunk in which they rise too far is cut. Backward uses the same cuts.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.chunk import (
    KeyChunk,
    divide,
    empty_state,
    key_chunk,
    key_scores,
    largest_of_chunk,
    query_features,
    query_scores,
    subtract_largest,
)
from klformer.ops.spectral_product.chunked.modulation import demodulate, modulate, modulate_vjp
from klformer.ops.spectral_product.chunked.residuals import Gradients, Residuals, TileGradients
from klformer.ops.spectral_product.chunked.tiling import Tile, chunk_bounds, tiles
from klformer.ops.spectral_product.operands import SpectralOperands
from klformer.ops.spectral_product.state import NO_KEY, KeyValueState

CHUNKS_PER_CHECKPOINT = 16
#: Log-weights of keys may rise by so much inside a chunk: exp(-40) is far above the smallest number.
MAX_RISE = 40.0


def empty(operands: SpectralOperands, chunk: int) -> Residuals:
    """Room for what `forward` gives."""
    num_states = -(-operands.q.shape[2] // (chunk * CHUNKS_PER_CHECKPOINT))
    return Residuals.empty(operands, num_states=num_states, segmented=operands.num_shifts > 0)


def forward(operands: SpectralOperands, chunk: int) -> Residuals:
    """The normalised product of every query with the keys up to its own position."""
    saved = empty(operands, chunk)
    saved.starts.zero_()
    for tile in tiles(operands, chunk):
        state = empty_state(tile)
        for index, (start, stop) in enumerate(chunk_bounds(operands.q.shape[2], chunk)):
            if index % CHUNKS_PER_CHECKPOINT == 0:
                saved.save_state(tile, state, index // CHUNKS_PER_CHECKPOINT)
            pending = [(start, stop)]
            while pending:
                segment = pending.pop()
                advanced = _forward_segment(tile, state, saved, *segment)
                if advanced is None:
                    middle = (segment[0] + segment[1]) // 2
                    pending += [(middle, segment[1]), (segment[0], middle)]
                    continue
                state = advanced
                if operands.num_shifts:
                    saved.starts[tile.rows, segment[0]] = True
    return saved


def _forward_segment(
    tile: Tile, before: KeyValueState, saved: Residuals, start: int, stop: int
) -> KeyValueState | None:
    """Write the results of a segment and return what comes after it; None, changing nothing, if it must be cut."""
    fmap = tile.feature_map
    if stop - start > 1 and _rises_too_far(tile, before, start, stop):
        return None
    keys, queries = tile.keys(start, stop), tile.queries(start, stop)
    scores = key_scores(tile, keys, start, stop)
    largest = largest_of_chunk(tile, scores, start, stop)
    # The state is added to in place; only what may still be cut needs a copy.
    state = before.clone() if fmap.exponential else before
    if largest is not None:
        state.raise_shift(fmap, largest)
    chunk = key_chunk(tile, keys, scores, state.shift, start, stop)
    scores_q = query_scores(tile, queries, state.shift)
    query_shift = subtract_largest(tile, scores_q)
    phi_q = query_features(tile, scores_q)
    modulated = chunk.modulated()
    pairs = fmap.merge(torch.bmm(phi_q, chunk.phi.transpose(1, 2))).tril_()
    product = fmap.merge(torch.bmm(phi_q, state.product)).baddbmm_(pairs, modulated)
    product, slope = demodulate(product, tile.angle(queries))
    if tile.smoothing is not None:
        product.addcmul_(chunk.values.cumsum(1).add_(state.total), tile.smoothing)
    attended = divide(product, slope, query_shift)
    if fmap.exponential and stop - start > 1 and _underflowed(tile, before, attended.denominator, start, stop):
        return None
    saved.store(attended, tile, start, stop)
    state.product.baddbmm_(chunk.phi.transpose(1, 2), fmap.repeat(modulated))
    if tile.smoothing is not None:
        state.total += chunk.values.sum(1, keepdim=True)
    return state


def _rises_too_far(tile: Tile, before: KeyValueState, start: int, stop: int) -> bool:
    """Whether the log-weights of keys of a map that is not exponential rise so far that early ones may be lost."""
    bias = None if tile.feature_map.exponential else tile.key_bias(start, stop)
    if bias is None:
        return False
    so_far = torch.maximum(bias.cummax(1).values, before.shift)
    rise = so_far[:, -1:] - so_far
    # Where there was no key yet, there is nothing to lose.
    return bool(((rise > MAX_RISE) & (so_far > NO_KEY)).any())


def _underflowed(tile: Tile, before: KeyValueState, denominator: Tensor, start: int, stop: int) -> bool:
    """Whether a query that has a key got so small a denominator that terms of it may have been lost."""
    tiny = denominator < torch.finfo(denominator.dtype).tiny ** 0.5
    dropped = tile.dropped(start, stop)
    if dropped is not None:
        tiny &= (before.shift[..., :1] > NO_KEY) | (~dropped).cumsum(1).bool()
    return bool(tiny.any())


@dataclass
class _Segment:
    """A segment of the stretch that backward is in, and what was carried into it, referring to its own shift."""

    start: int
    stop: int
    chunk: KeyChunk
    state: KeyValueState
    factor: Tensor | None  # by which the state before became smaller, (n, 1, R or 1)


def backward(
    operands: SpectralOperands, saved: Residuals, d_out: Tensor, needed: Collection[str], chunk: int
) -> dict[str, Tensor]:
    """Gradients of the operands that are needed."""
    gradients = Gradients(operands, needed)
    length, stretch = operands.q.shape[2], chunk * CHUNKS_PER_CHECKPOINT
    for tile in tiles(operands, chunk):
        collect = TileGradients(tile, gradients)
        d_state = empty_state(tile)  # of the product and the total
        for index in reversed(range(saved.product.shape[2])):
            bounds = list(_segment_bounds(saved, tile, index * stretch, min((index + 1) * stretch, length), chunk))
            for segment in reversed(_segments_of_stretch(tile, saved, index, bounds)):
                _backward_segment(tile, segment, d_out, saved, d_state, collect)
        collect.finish()
    return gradients.by_name


def _segment_bounds(saved: Residuals, tile: Tile, start: int, stop: int, chunk: int) -> Iterator[tuple[int, int]]:
    """The segments that forward worked in between two positions."""
    if not tile.operands.num_shifts:
        for first, last in chunk_bounds(stop - start, chunk):
            yield start + first, start + last
        return
    starts = saved.starts[tile.rows.start, start:stop].nonzero().flatten().add_(start).tolist()
    yield from zip(starts, [*starts[1:], stop], strict=True)


def _segments_of_stretch(tile: Tile, saved: Residuals, index: int, bounds: list[tuple[int, int]]) -> list[_Segment]:
    """Carry the state forward through a stretch again, from its checkpoint."""
    fmap, state, segments = tile.feature_map, saved.load_state(tile, index), []
    for start, stop in bounds:
        keys = tile.keys(start, stop)
        scores = key_scores(tile, keys, start, stop)
        largest = largest_of_chunk(tile, scores, start, stop)
        factor = None if largest is None else state.raise_shift(fmap, largest)
        chunk = key_chunk(tile, keys, scores, state.shift, start, stop)
        segments.append(_Segment(start, stop, chunk, state.clone(), factor))
        state.product.baddbmm_(chunk.phi.transpose(1, 2), fmap.repeat(chunk.modulated()))
        if tile.smoothing is not None:
            state.total += chunk.values.sum(1, keepdim=True)
    return segments


def _backward_segment(
    tile: Tile, segment: _Segment, d_out: Tensor, saved: Residuals, d_state: KeyValueState, collect: TileGradients
) -> None:
    """Gradients of one segment. `d_state` comes as that of what it carries out, and leaves as that of what is carried
    in."""
    fmap, start, stop, chunk = tile.feature_map, segment.start, segment.stop, segment.chunk
    queries = tile.queries(start, stop)
    scores_q = query_scores(tile, queries, segment.state.shift)
    if fmap.exponential:
        scores_q -= saved.query_shift[tile.rows, start:stop]
    phi_q = query_features(tile, scores_q)
    modulated = chunk.modulated()
    d_product, d_query_angle = saved.product_gradient(tile, d_out, start, stop)
    d_modulated = modulate(d_product, tile.angle(queries))

    pairs = fmap.merge(torch.bmm(phi_q, chunk.phi.transpose(1, 2))).tril_()
    d_pairs = torch.bmm(d_modulated, modulated.transpose(1, 2)).tril_()
    d_weighted = fmap.merge(torch.bmm(chunk.phi, d_state.product)).baddbmm_(pairs.transpose(1, 2), d_modulated)
    d_modulated, modulated, d_pairs = (fmap.repeat(x) for x in (d_modulated, modulated, d_pairs))
    d_phi_q = torch.bmm(d_modulated, segment.state.product.transpose(1, 2)).baddbmm_(d_pairs, chunk.phi)
    d_phi_k = torch.bmm(modulated, d_state.product.transpose(1, 2)).baddbmm_(d_pairs.transpose(1, 2), phi_q)
    d_values, d_key_angle = modulate_vjp(chunk.values, d_weighted, chunk.angle)
    if tile.smoothing is not None:
        if collect.needs_smoothing:
            collect.add_smoothing(d_product, chunk.values.cumsum(1).add_(segment.state.total))
        # Every key is in the totals of its own and all later queries. Added up from the end: a difference of two sums
        # would lose the later ones beside larger earlier ones.
        from_here = d_product.flip(1).cumsum(1).flip(1).add_(d_state.total)
        d_values.addcmul_(from_here, tile.smoothing)
        d_state.total = from_here[:, :1]

    d_state.product.baddbmm_(phi_q.transpose(1, 2), d_modulated)
    if segment.factor is not None:
        d_state.product.mul_(fmap.repeat(segment.factor.transpose(1, 2)))
        if not fmap.exponential:
            d_state.total.mul_(segment.factor)
    collect.store_queries(queries, phi_q, d_phi_q, d_query_angle, start, stop)
    collect.store_keys(chunk, d_phi_k, d_values, d_key_angle, start)
