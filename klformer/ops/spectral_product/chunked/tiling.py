"""How the product is cut up: tiles of (batch, head) rows, chunks of the sequence, and the operands of each piece.

A tile is a few (batch, head) rows that are worked on together; the sequence of a tile is walked through in chunks.
Both are sized so that the features of a chunk stay in cache, and nothing that is made for a chunk outlives it: the
scores of all chunks of a tile are written to the same memory (`Scratch`). `Tile` hands out the operands of a chunk
ready for use: in the working precision, padding removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.workspace import borrow
from klformer.ops.spectral_product.operands import SpectralOperands

#: Features of one chunk of a tile, in bytes: what the caches hold on a CPU, what keeps a GPU busy.
CPU_CHUNK_BYTES = 2 * 2**20
GPU_CHUNK_BYTES = 64 * 2**20
#: Tokens of a chunk on a CPU: below the first, calls cost more than arithmetic; above the second, nothing is gained.
MIN_CHUNK, MAX_CHUNK = 32, 1024
#: Chunk lengths of the causal product: the first that is not below the number of values, or the last.
CAUSAL_CHUNKS = (32, 64)
#: On a GPU: the states of chunks are added up one after the other, a few launches each.
GPU_CAUSAL_CHUNK = 128
#: Tokens of a block of the causal product for each feature, or more: the state that is kept for it is then as large as
#: a quarter of the values.
TOKENS_PER_FEATURE = 4
#: Rows of a tile that a chunk leaves room for, where there are as many.
ROWS = 8


@dataclass(frozen=True)
class Cut:
    """How a call is cut up."""

    #: Tokens a chunk.
    chunk: int
    #: (batch, head) rows a tile.
    rows: int
    #: Tokens of the causal product that are worked on together, a multiple of the chunk.
    block: int = 0


def cut(operands: SpectralOperands, *, chunk: int | None = None, width: int | None = None) -> Cut:
    """Pieces whose numbers fit the budget of the device, `width` of them a token; `chunk` tokens each if given."""
    budget = _budget(operands.q.device)
    if width is None:
        # Pairs of frequencies double the values instead of the features, and chunks have several copies of them.
        width = operands.num_features + (0 if operands.kernel.pair_offset is None else operands.value_columns)
    per_token = width * operands.dtype.itemsize
    rows = max(1, operands.q.shape[0] * operands.q.shape[1])
    if chunk is None:
        on_cpu = operands.q.device.type == "cpu"
        chunk = max(MIN_CHUNK, budget // (per_token * min(rows, ROWS if on_cpu else rows)))
        chunk = min(chunk, MAX_CHUNK) if on_cpu else chunk
        chunk = min(chunk, max(1, operands.q.shape[2], operands.k.shape[2]))
    return Cut(chunk, max(1, budget // (per_token * chunk)))


def causal_cut(operands: SpectralOperands, *, chunk: int | None = None) -> Cut:
    """Blocks of chunks whose features fit the budget of the device; chunks of `chunk` tokens if given."""
    budget, num_values = _budget(operands.q.device), operands.v.shape[-1]
    if chunk is None:
        # The (chunk, chunk) scores cost as much as the state where a chunk is as long as a value is wide.
        chunk = next(size for size in CAUSAL_CHUNKS if size >= num_values or size == CAUSAL_CHUNKS[-1])
        chunk = chunk if operands.q.device.type == "cpu" else GPU_CAUSAL_CHUNK
    per_token = operands.num_features * operands.dtype.itemsize
    length = max(1, operands.q.shape[2])
    tokens = min(
        max(
            TOKENS_PER_FEATURE * operands.num_features,
            budget // (per_token * max(1, operands.q.shape[0] * operands.q.shape[1])),
        ),
        length,
    )
    block = max(1, tokens // chunk) * chunk
    return Cut(chunk, max(1, budget // (per_token * min(block, length))), block)


def tiles(operands: SpectralOperands, rows: int) -> "Iterator[Tile]":
    """The (batch, head) rows in groups; a group is whole batch entries, or some heads of one."""
    batch, heads = operands.q.shape[:2]
    if rows >= heads:
        step = max(1, rows // max(1, heads))
        for start in range(0, batch, step):
            yield Tile(operands, slice(start, min(start + step, batch)), slice(0, heads))
        return
    # Equal groups: 8 heads that fit 7 at a time go as 4 + 4.
    groups = -(-heads // rows)
    step = -(-heads // groups)
    for entry in range(batch):
        for start in range(0, heads, step):
            yield Tile(operands, slice(entry, entry + 1), slice(start, min(start + step, heads)))


def _budget(device: torch.device) -> int:
    return CPU_CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES


class Tile:
    """Some (batch, head) rows of a call; n of them."""

    def __init__(self, operands: SpectralOperands, batch: slice, heads: slice) -> None:
        kernel = operands.kernel
        self.operands = operands
        self.feature_map = kernel.feature_map
        self._batch, self._heads = batch, heads
        self._num_batch, self._num_heads = batch.stop - batch.start, heads.stop - heads.start
        self.num_rows = self._num_batch * self._num_heads
        first = batch.start * operands.q.shape[1] + heads.start
        #: Where the rows stand in a (B * H, ...) view of a result.
        self.rows = slice(first, first + self.num_rows)
        self.omega = self._per_row(kernel.omega)  # (n, R, D)
        self.pair_offset = self._per_row(kernel.pair_offset, unsqueeze=-2)  # (n, 1, D)
        self.frequency_bias = self._per_row(kernel.frequency_bias, unsqueeze=-2)  # (n, 1, R)
        self.smoothing = self._per_row(kernel.smoothing, unsqueeze=-1)  # (n, 1)
        if self.smoothing is not None:
            # The features leave out the factor 1/R, so that the constant takes R: a common factor cancels.
            self.smoothing = self.smoothing.unsqueeze(-1) * operands.num_projections  # (n, 1, 1)
        self._dropped = None if operands.key_mask is None else ~self._per_key(operands.key_mask)
        # Most rows have no padding. To look costs little, but for a GPU, which would have to be waited for.
        if self._dropped is not None and self._dropped.device.type == "cpu" and not bool(self._dropped.any()):
            self._dropped = None

    def _per_row(self, parameter: Tensor | None, unsqueeze: int | None = None) -> Tensor | None:
        """(H or 1, ...) -> (n, ...) in the working precision."""
        if parameter is None:
            return None
        heads = parameter[self._heads] if parameter.shape[0] > 1 else parameter
        rows = heads.to(self.operands.dtype).expand(self._num_batch, self._num_heads, *parameter.shape[1:])
        rows = rows.reshape(self.num_rows, *parameter.shape[1:])
        return rows if unsqueeze is None else rows.unsqueeze(unsqueeze)

    def _per_key(self, tensor: Tensor) -> Tensor:
        """(B or 1, H or 1, S) -> (n, S, 1)."""
        batch = tensor[self._batch] if tensor.shape[0] > 1 else tensor
        rows = batch[:, self._heads] if tensor.shape[1] > 1 else batch
        return rows.expand(self._num_batch, self._num_heads, tensor.shape[2]).reshape(self.num_rows, -1, 1)

    def log_weights(self) -> Tensor | None:
        """The keys' log-weights (n, S, 1), -inf where there is no key; None where all are 0 and there."""
        bias = self.operands.key_bias
        if bias is None and self._dropped is None:
            return None
        if bias is None:
            bias = self.operands.k.new_zeros(1, 1, 1).expand(1, 1, self.operands.k.shape[2])
        rows = self._per_key(bias).to(self.operands.dtype)
        return rows if self._dropped is None else rows.masked_fill(self._dropped, -torch.inf)

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros (n, *shape) in the working precision."""
        return self.operands.q.new_zeros(self.num_rows, *shape, dtype=self.operands.dtype)

    def add_to_parameter(self, gradient: Tensor, rows: Tensor) -> None:
        """Add the gradients of the rows (n, ...) to that of the parameter they came from, (H or 1, ...)."""
        per_head = rows.view(self._num_batch, -1, *rows.shape[1:]).sum(0)
        if gradient.shape[0] > 1:
            gradient[self._heads] += per_head
        else:
            gradient += per_head.sum(0, keepdim=True)

    def add_to_keys(self, gradient: Tensor, rows: Tensor) -> None:
        """Add the gradients of the rows (n, S) to that of log-weights of keys, (B or 1, H or 1, S)."""
        per_head = rows.view(self._num_batch, self._num_heads, -1)
        if gradient.shape[1] == 1:
            per_head = per_head.sum(1, keepdim=True)
        if gradient.shape[0] == 1:
            per_head = per_head.sum(0, keepdim=True)
        batch = self._batch if gradient.shape[0] > 1 else slice(None)
        heads = self._heads if gradient.shape[1] > 1 else slice(None)
        gradient[batch, heads] += per_head

    def chunk(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Positions start to stop of a (B, H, length, .) tensor as (n, chunk, .), in the working precision."""
        piece = tensor[self._batch, self._heads, start:stop]
        return piece.to(self.operands.dtype).reshape(self.num_rows, stop - start, tensor.shape[-1])

    def dropped(self, start: int, stop: int) -> Tensor | None:
        """True where a key is padding, (n, chunk, 1); None where no key can be."""
        return None if self._dropped is None else self._dropped[:, start:stop]

    def queries(self, start: int, stop: int) -> Tensor:
        return self.chunk(self.operands.q, start, stop)

    def keys(self, start: int, stop: int) -> Tensor:
        """Keys of a chunk, padding replaced by zeros."""
        return self._kept(self.chunk(self.operands.k, start, stop), start, stop)

    def values(self, start: int, stop: int) -> Tensor:
        """Values of a chunk, padding replaced by zeros."""
        return self._kept(self.chunk(self.operands.v, start, stop), start, stop)

    def _kept(self, x: Tensor, start: int, stop: int) -> Tensor:
        dropped = self.dropped(start, stop)
        return x if dropped is None else x.masked_fill(dropped, 0)


class Scratch:
    """Memory of chunks, used again by every chunk and every tile.

    Args:
        tile: Whose rows and precision it has.
        chunk: The longest chunk.
        width: Numbers a token.
        use: What it holds; another scratch for the same use has the same memory.
    """

    def __init__(self, tile: Tile, chunk: int, width: int, use: str) -> None:
        self._width, self._rows = width, tile.num_rows
        self._flat = borrow(use, (tile.num_rows * chunk * width,), tile.operands.q, tile.operands.dtype)

    def tokens_first(self, length: int) -> Tensor:
        """(n, length, width), uninitialised."""
        return self._flat[: self._rows * length * self._width].view(self._rows, length, self._width)

    def features_first(self, length: int) -> Tensor:
        """(n, width, length), uninitialised."""
        return self._flat[: self._rows * length * self._width].view(self._rows, self._width, length)


def with_column(x: Tensor, *columns: Tensor | float, use: str | None = None) -> Tensor:
    """x (n, length, width) with more columns: tensors (n, length, 1), or numbers. In memory that the next one for the
    same `use` overwrites, if one is given."""
    given = [c if isinstance(c, Tensor) else x.new_full((1, 1, 1), c).expand(*x.shape[:2], 1) for c in columns]
    if use is None:
        return torch.cat([x, *given], dim=-1)
    shape = (*x.shape[:2], x.shape[2] + len(given))
    return torch.cat([x, *given], dim=-1, out=borrow(use, shape, x, x.dtype))


def multiply_into(place: Tensor, left: Tensor, right: Tensor, *, divisor: Tensor | None = None) -> None:
    """Write the product of two batches of matrices to a place, which may have another precision."""
    product = torch.bmm(left, right, out=place) if place.dtype == left.dtype else torch.bmm(left, right)
    if divisor is not None:
        product.div_(divisor)
    if product is not place:
        place.copy_(product)


def chunk_bounds(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive chunks that cover 0 .. length."""
    for start in range(0, length, chunk):
        yield start, min(start + chunk, length)
