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
state, (W, F), with a row of ones as in `plain`. Scores of exponential maps are to base 2 as in `positive`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.block import Block, Carried
from klformer.ops.spectral_product.chunked.gradients import Gradients, TileGradients
from klformer.ops.spectral_product.chunked.tiling import Cut, Tile, tiles
from klformer.ops.spectral_product.key_values import NO_KEY
from klformer.ops.spectral_product.operands import SpectralOperands

#: Tokens of the chunks that a block is done with again, where those before were too long.
SHORTER_CHUNKS = (8, 1)


@dataclass
class Residuals:
    """The result, and what backward needs besides the operands. Rows are (batch, head) pairs, B * H of them."""

    out: Tensor  # (B, H, L, E)
    denominator: Tensor  # (B * H, 1, L)
    query_shift: Tensor  # (B * H, L, 1) largest score of each query; L = 0 where the map needs none
    state: Tensor  # (B * H, blocks, W, F) before each block
    total: Tensor  # (B * H, blocks, E + 1, 1); no blocks without smoothing
    key_shift: Tensor  # (B * H, blocks, shifts)
    chunk: Tensor  # (B * H, blocks) tokens of the chunks

    @staticmethod
    def empty(operands: SpectralOperands, cut: Cut) -> "Residuals":
        batch, heads, length, _ = operands.q.shape
        rows, blocks = batch * heads, len(list(_blocks(length, cut)))

        def empty(*shape: int, dtype: torch.dtype = operands.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=operands.q.device)

        return Residuals(
            out=empty(batch, heads, length, operands.v.shape[-1], dtype=operands.v.dtype),
            denominator=empty(rows, 1, length),
            query_shift=empty(rows, length if operands.feature_map.exponential else 0, 1),
            state=empty(rows, blocks, operands.value_columns, operands.num_features),
            total=empty(rows, blocks if operands.kernel.smoothing is not None else 0, operands.v.shape[-1] + 1, 1),
            key_shift=empty(rows, blocks, operands.num_shifts),
            chunk=empty(rows, blocks, dtype=torch.int64),
        )

    def save(self, tile: Tile, carried: Carried, index: int) -> None:
        """Keep what is carried into a block."""
        self.state[tile.rows, index], self.key_shift[tile.rows, index : index + 1] = carried.state, carried.shift
        if tile.smoothing is not None:
            self.total[tile.rows, index] = carried.total

    def load(self, tile: Tile, index: int) -> Carried:
        """What was carried into a block; without smoothing its total is empty."""
        total = self.state.new_empty(0) if tile.smoothing is None else self.total[tile.rows, index]
        return Carried(self.state[tile.rows, index], total, self.key_shift[tile.rows, index : index + 1])

    def as_list(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def _blocks(length: int, cut: Cut) -> Iterator[tuple[int, int]]:
    """(start, stop) of the blocks: whole chunks as far as they go, then what is left."""
    whole = length - length % cut.chunk
    for start in range(0, whole, cut.block):
        yield start, min(start + cut.block, whole)
    if whole < length:
        yield whole, length


def _pieces(start: int, stop: int, chunk: int, cut: Cut) -> Iterator[tuple[int, int]]:
    """A block in parts that take no more memory with shorter chunks, of which there are more states."""
    step = max(chunk, cut.block * chunk // cut.chunk)
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _carried_before(tile: Tile, before: Carried | None = None) -> Carried:
    """What is carried into the first block: nothing, or what came before the sequence, of all rows."""
    if before is not None:
        return Carried(before.state[tile.rows], before.total[tile.rows], before.shift[tile.rows])
    operands = tile.operands
    shift = tile.new_zeros(1, operands.num_shifts).fill_(NO_KEY)
    state, total = (
        tile.new_zeros(operands.value_columns, operands.num_features),
        tile.new_zeros(operands.v.shape[-1] + 1, 1),
    )
    return Carried(state, total, shift)


def empty(operands: SpectralOperands, cut: Cut) -> list[Tensor]:
    """Room for what `forward` gives."""
    return Residuals.empty(operands, cut).as_list()


def forward(operands: SpectralOperands, cut: Cut, before: Carried | None = None) -> list[Tensor]:
    """The result, and what backward needs; `before` are sums of keys that every query sees, if there are any."""
    saved = Residuals.empty(operands, cut)
    saved.chunk.fill_(cut.chunk)
    for tile in tiles(operands, cut.rows):
        lost, carried = [], _carried_before(tile, before)
        for index, (start, stop) in enumerate(_blocks(operands.q.shape[2], cut)):
            carried, lost_here = _forward_block(tile, saved, carried, index, start, stop, cut)
            lost.append(lost_here)
        if operands.num_shifts and _lost_anything(lost):
            _forward_carefully(tile, saved, cut, before)
    return saved.as_list()


def _lost_anything(lost: list[Tensor]) -> bool:
    """Whether any block of a tile was marked: the one time that a device is waited for."""
    return bool(lost) and bool(torch.stack(lost).any())


def _forward_carefully(tile: Tile, saved: Residuals, cut: Cut, before: Carried | None) -> None:
    """Do a tile again, each block with chunks that are short enough."""
    carried = _carried_before(tile, before)
    for index, (start, stop) in enumerate(_blocks(tile.operands.q.shape[2], cut)):
        for chunk in (cut.chunk, *(shorter for shorter in SHORTER_CHUNKS if shorter < cut.chunk)):
            if (stop - start) % chunk and chunk != cut.chunk:
                continue
            saved.chunk[tile.rows, index] = chunk
            after, lost = _forward_block(tile, saved, carried, index, start, stop, cut, chunk)
            if not bool(lost):
                break
        carried = after


def _forward_block(
    tile: Tile,
    saved: Residuals,
    carried: Carried,
    index: int,
    start: int,
    stop: int,
    cut: Cut,
    chunk: int | None = None,
) -> tuple[Carried, Tensor]:
    """Write the results of a block; returns what is carried on, and whether anything may have been lost."""
    rows, chunk = tile.rows, cut.chunk if chunk is None else chunk
    saved.save(tile, carried, index)
    lost = torch.zeros((), dtype=torch.bool, device=saved.out.device)
    for first, last in _pieces(start, stop, chunk, cut):
        block = Block(tile, first, last, chunk, carried)
        out, denominator = block.attend()
        saved.out.flatten(0, 1)[rows, first:last] = out
        saved.denominator[rows, :, first:last] = denominator
        if block.query_shift is not None:
            saved.query_shift[rows, first:last] = block.query_shift
        if tile.operands.num_shifts and chunk > 1:
            lost |= block.loses(denominator, carried)
        carried = block.after
    return carried, lost


def backward(
    operands: SpectralOperands,
    saved_list: list[Tensor],
    d_out: Tensor,
    needed: Collection[str],
    cut: Cut,
    d_before: Carried | None = None,
) -> dict[str, Tensor]:
    """Gradients of the operands that are needed; those of what came before are written to `d_before`."""
    gradients, saved = Gradients(operands, needed), Residuals(*saved_list)
    chunks = saved.chunk.tolist()
    blocks = list(enumerate(_blocks(operands.q.shape[2], cut)))
    for tile in tiles(operands, cut.rows):
        collect = TileGradients(tile, gradients)
        d_carried = _carried_before(tile)
        for index, (start, stop) in reversed(blocks):
            chunk = chunks[tile.rows.start][index]
            carried, pieces = saved.load(tile, index), []
            for first, last in _pieces(start, stop, chunk, cut):
                pieces.append((first, last, carried))
                if last < stop:
                    carried = Block(tile, first, last, chunk, carried, with_queries=False).after
            for first, last, before in reversed(pieces):
                shift = saved.query_shift[tile.rows, first:last] if operands.feature_map.exponential else None
                block = Block(tile, first, last, chunk, before, query_shift=shift)
                out = tile.chunk(saved.out, first, last)
                d_carried = block.backward(
                    collect, tile.chunk(d_out, first, last), out, saved.denominator[tile.rows, :, first:last], d_carried
                )
        if d_before is not None:
            d_before.state[tile.rows] = d_carried.state
            if tile.smoothing is not None:
                d_before.total[tile.rows] = d_carried.total
        collect.finish()
    return gradients.by_name
