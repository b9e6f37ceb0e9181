"""The linear-time product with a causal mask: chunks of the sequence with a carried state, many chunks at a time.

Within a chunk the scores are an ordinary (chunk, chunk) matrix under a triangular mask; everything before the chunk
is in the state. A block is some chunks that are worked on as one batch, so that the number of calls does not grow with
the number of chunks; only the states of its chunks are added up one after the other. Forward keeps the state before
each block; backward goes through the blocks from last to first, makes the features of a block again, and carries the
gradient of the state backward.

Exponential maps: a chunk's features refer to the largest key score up to the end of the chunk, feature by feature. A
key that stands late in the chunk and is larger by far than what came before would make the earlier ones underflow for
the earlier queries, which do not see it. That shows as a tiny denominator. It is looked for once, after all blocks; if
it is there, the tile is done again, and every block where it shows with chunks of 8, then of 1, where the denominator
is at least 1. The log-weights of keys of other maps are treated alike: they may not rise too far inside a chunk.
Backward uses the same chunks.

Tokens stand first, (n, tokens, F), so that a block is n * chunks matrices without a copy; values stand first in a
state, (W, F), with a row of weights (`carried.py`). Scores of exponential maps are to base 2 as in `exponential`.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from klformer.ops.spectral_product.autograd import empty_results
from klformer.ops.spectral_product.chunked.carried import Carried, sums_before, write_sums
from klformer.ops.spectral_product.chunked.causal_block import Block
from klformer.ops.spectral_product.chunked.exponential import LOG2_E
from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.tiles import Cut, Tile, tiles
from klformer.ops.spectral_product.operands import Call, Sums

#: Tokens of the chunks that a block is done with again, where those before were too long.
SHORTER_CHUNKS = (8, 1)


@dataclass
class Kept:
    """What backward needs besides the results."""

    denominator: Tensor  # (B, H, L), before `floor` adds to it
    query_shift: Tensor  # (B, H, L) largest score of each query; L = 0 where the map needs none
    state: Tensor  # (B, H, blocks, W, F) before each block
    total: Tensor  # (B, H, blocks, E + 1, 1); no blocks without smoothing
    shift: Tensor  # (B, H, blocks, 1, R or 1)
    chunk: Tensor  # (B, H, blocks) tokens of the chunks

    @staticmethod
    def empty(call: Call, cut: Cut) -> "Kept":
        assert call.q is not None
        batch, heads, length, _ = call.q.shape
        blocks, num_values = (length + cut.block - 1) // cut.block, call.value_dim + 1
        pairs = 1 if call.kernel.pair_offset is None else 2

        def empty(*shape: int, dtype: torch.dtype = call.dtype) -> Tensor:
            return torch.empty((batch, heads, *shape), dtype=dtype, device=call.device)

        return Kept(
            denominator=empty(length),
            query_shift=empty(length if call.feature_map.exponential else 0),
            state=empty(blocks, pairs * num_values, call.num_features),
            total=empty(blocks if call.kernel.smoothing is not None else 0, num_values, 1),
            shift=empty(blocks, 1, call.num_scales),
            chunk=empty(blocks, dtype=torch.int64),
        )

    def as_list(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def save(self, tile: Tile, carried: Carried, index: int) -> None:
        """Keep what is carried into a block."""
        tile.write(self.state[:, :, index], carried.state)
        tile.write(self.shift[:, :, index], carried.shift)
        if tile.smoothing is not None:
            tile.write(self.total[:, :, index], carried.total)

    def load(self, tile: Tile, index: int) -> Carried:
        """Return what was carried into a block."""
        total = tile.new_zeros(tile.call.value_dim + 1, 1)
        if tile.smoothing is not None:
            total = tile.rows(self.total[:, :, index])
        return Carried(tile.rows(self.state[:, :, index]), total, tile.rows(self.shift[:, :, index]))


def _unit(call: Call) -> float:
    """Return a natural logarithm of 1 as those of a state are inside."""
    return LOG2_E if call.feature_map.exponential else 1.0


def _blocks(length: int, cut: Cut) -> Iterator[tuple[int, int]]:
    for start in range(0, length, cut.block):
        yield start, min(start + cut.block, length)


def _pieces(start: int, stop: int, chunk: int, cut: Cut) -> Iterator[tuple[int, int]]:
    """Yield the parts of a block that are worked on together: whole chunks, then what is left. With shorter chunks, of
    which there are more states, they take no more memory."""
    whole, step = stop - (stop - start) % chunk, max(chunk, cut.block * chunk // cut.chunk)
    for first in range(start, whole, step):
        yield first, min(first + step, whole)
    if whole < stop:
        yield whole, stop


def forward(call: Call, cut: Cut, *, keep: bool) -> list[Tensor]:
    """Return the result, its log-sums, the sums of all keys, and what backward needs."""
    assert call.q is not None
    (out, log_sum, *sums), kept = empty_results(call), Kept.empty(call, cut)
    kept.chunk.fill_(cut.chunk)
    for tile in tiles(call, cut.rows):
        lost, carried = [], sums_before(tile, _unit(call))
        for index, (start, stop) in enumerate(_blocks(call.q.shape[2], cut)):
            carried, lost_here = _forward_block(tile, kept, out, log_sum, carried, index, start, stop, cut)
            lost.append(lost_here)
        if (tile.has_weights or call.feature_map.exponential) and _lost_anything(lost):
            carried = _forward_carefully(tile, kept, out, log_sum, cut)
        write_sums(tile, carried, Sums(*sums), _unit(call))
    return [out, log_sum, *sums, *(kept.as_list() if keep else [])]


def _lost_anything(lost: list[Tensor]) -> bool:
    """Return whether any block of a tile was marked: the one time that a device is waited for."""
    return bool(lost) and bool(torch.stack(lost).any())


def _forward_carefully(tile: Tile, kept: Kept, out: Tensor, log_sum: Tensor, cut: Cut) -> Carried:
    """Do a tile again, each block with chunks that are short enough; return what is carried on."""
    assert tile.call.q is not None
    carried = sums_before(tile, _unit(tile.call))
    for index, (start, stop) in enumerate(_blocks(tile.call.q.shape[2], cut)):
        for chunk in (cut.chunk, *(shorter for shorter in SHORTER_CHUNKS if shorter < cut.chunk)):
            tile.write(kept.chunk[:, :, index], torch.full_like(tile.new_zeros(), chunk))
            after, lost = _forward_block(tile, kept, out, log_sum, carried, index, start, stop, cut, chunk)
            if not bool(lost):
                break
        carried = after
    return carried


def _forward_block(
    tile: Tile,
    kept: Kept,
    out: Tensor,
    log_sum: Tensor,
    carried: Carried,
    index: int,
    start: int,
    stop: int,
    cut: Cut,
    chunk: int | None = None,
) -> tuple[Carried, Tensor]:
    """Write the results of a block; return what is carried on, and whether anything may have been lost."""
    chunk = cut.chunk if chunk is None else chunk
    kept.save(tile, carried, index)
    lost = torch.zeros((), dtype=torch.bool, device=out.device)
    for first, last in _pieces(start, stop, chunk, cut):
        block = Block(tile, first, last, chunk, carried)
        quotient, denominator, logs = block.attend()
        tile.write(out[:, :, first:last], quotient)
        tile.write(kept.denominator[:, :, first:last], denominator)
        tile.write(log_sum[:, :, first:last], logs)
        if block.query_shift is not None:
            tile.write(kept.query_shift[:, :, first:last], block.query_shift.squeeze(-1))
        if chunk > 1:
            lost |= block.loses(denominator, carried)
        carried = block.after
    return carried, lost


def backward(
    call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str], cut: Cut
) -> dict[str, Tensor]:
    """Return the gradients of the tensors that are needed."""
    assert call.q is not None
    gradients, kept = Gradients(call, needed), Kept(*outputs[5:])
    d_out, d_log_sum, d_values, d_weights, _ = d_results
    blocks = list(enumerate(_blocks(call.q.shape[2], cut)))
    for tile in tiles(call, cut.rows):
        collect, d_carried = TileGradients(tile, gradients), Carried.of(tile, d_values, d_weights)
        chunks = tile.rows(kept.chunk)[0].int().tolist() if tile.num_rows else []
        for index, (start, stop) in reversed(blocks):
            carried, pieces = kept.load(tile, index), []
            for first, last in _pieces(start, stop, chunks[index], cut):
                pieces.append((first, last, carried))
                if last < stop:
                    carried = Block(tile, first, last, chunks[index], carried, with_queries=False).after
            for first, last, before in reversed(pieces):
                shift = None
                if call.feature_map.exponential:
                    shift = tile.rows(kept.query_shift[:, :, first:last]).unsqueeze(-1)
                block = Block(tile, first, last, chunks[index], before, query_shift=shift)
                d_carried = block.backward(
                    collect,
                    d_out=None if d_out is None else tile.chunk(d_out, first, last),
                    d_log_sum=None if d_log_sum is None else tile.rows(d_log_sum[:, :, first:last]),
                    out=outputs[0],
                    denominator=tile.rows(kept.denominator[:, :, first:last]),
                    d_after=d_carried,
                )
        if call.sums is not None:
            _write_gradient_of_sums(tile, gradients, d_carried)
        collect.finish()
    return gradients.by_name


def _write_gradient_of_sums(tile: Tile, gradients: Gradients, d_before: Carried) -> None:
    """Write the gradients of the sums that a call went on from: results depend on exp(log_scale) times them."""
    by_name, before = gradients.by_name, sums_before(tile, 1.0)
    d_before.write(tile, by_name["values"], by_name["weights"])
    d_scale = (d_before.state * before.state).sum(1)  # (n, F)
    if not tile.feature_map.exponential:
        d_scale = d_scale.sum(1, keepdim=True) + (d_before.total * before.total).sum(1)
    tile.write(by_name["log_scale"], d_scale)
