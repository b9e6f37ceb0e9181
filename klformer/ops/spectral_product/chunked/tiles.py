"""How a call is cut up: tiles of (batch, head) rows, chunks of the sequence, and the operands of each piece.

A tile is a few (batch, head) rows that are worked on together; the sequence of a tile is walked through in chunks. Both
are sized so that the features of a chunk stay in cache, and nothing that is made for a chunk outlives it: the scores of
all chunks are written to the same memory (`Scratch`). The rows of a tile stand head by head, so that the frequencies of
a head meet the tokens of all its sequences in one matrix product. `Tile` hands out the operands of a chunk ready for
use: in the working precision, padding removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.memory import borrow
from klformer.ops.spectral_product.operands import Call

#: Features of one chunk of a tile, in bytes: what the caches hold on a CPU, what keeps a GPU busy.
CPU_CHUNK_BYTES = 2 * 2**20
GPU_CHUNK_BYTES = 128 * 2**20
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


def cut(call: Call, *, chunk: int | None = None) -> Cut:
    """Return pieces whose features fit the budget of the device; `chunk` tokens each if given."""
    on_cpu = call.device.type == "cpu"
    budget = CPU_CHUNK_BYTES if on_cpu else GPU_CHUNK_BYTES
    # Pairs of frequencies double the values instead of the features, and chunks have several copies of them.
    width = call.num_features + (0 if call.kernel.pair_offset is None else 2 * (call.value_dim + 1))
    per_token = width * call.dtype.itemsize
    rows = max(1, call.batch_size * call.num_heads)
    if chunk is None:
        chunk = max(MIN_CHUNK, budget // (per_token * min(rows, ROWS if on_cpu else rows)))
        chunk = min(chunk, MAX_CHUNK) if on_cpu else chunk
        chunk = min(chunk, max(1, call.tokens.shape[2]))
    return Cut(chunk, max(1, budget // (per_token * chunk)))


def causal_cut(call: Call, *, chunk: int | None = None) -> Cut:
    """Return blocks of chunks whose features fit the budget of the device; chunks of `chunk` tokens if given.

    A block does not depend on the length: the number of blocks is then a plain function of it for torch.compile.
    """
    on_cpu = call.device.type == "cpu"
    budget = CPU_CHUNK_BYTES if on_cpu else GPU_CHUNK_BYTES
    if chunk is None:
        # The (chunk, chunk) scores cost as much as the state where a chunk is as long as a value is wide.
        chunk = next(size for size in CAUSAL_CHUNKS if size >= call.value_dim or size == CAUSAL_CHUNKS[-1])
        chunk = chunk if on_cpu else GPU_CAUSAL_CHUNK
    per_token = call.num_features * call.dtype.itemsize
    rows = max(1, call.batch_size * call.num_heads)
    tokens = max(TOKENS_PER_FEATURE * call.num_features, budget // (per_token * rows))
    block = max(1, tokens // chunk) * chunk
    return Cut(chunk, max(1, budget // (per_token * block)), block)


def tiles(call: Call, rows: int) -> "Iterator[Tile]":
    """Yield the (batch, head) rows in groups; a group is whole batch entries, or some heads of one."""
    batch, heads = call.batch_size, call.num_heads
    if rows >= heads:
        step = max(1, rows // max(1, heads))
        for start in range(0, batch, step):
            yield Tile(call, slice(start, min(start + step, batch)), slice(0, heads))
        return
    # Equal groups: 8 heads that fit 7 at a time go as 4 + 4.
    groups = -(-heads // rows)
    step = -(-heads // groups)
    for entry in range(batch):
        for start in range(0, heads, step):
            yield Tile(call, slice(entry, entry + 1), slice(start, min(start + step, heads)))


class Tile:
    """Some (batch, head) rows of a call; n of them, head by head."""

    def __init__(self, call: Call, batch: slice, heads: slice) -> None:
        kernel = call.kernel
        self.call, self.feature_map, self.dtype = call, kernel.feature_map, call.dtype
        self._batch, self._heads = batch, heads
        self.num_batch, self.num_heads = batch.stop - batch.start, heads.stop - heads.start
        self.num_rows = self.num_batch * self.num_heads
        self.omega = self._of_heads(kernel.omega)  # (heads or 1, R, D)
        self.pair_offset = self.per_row(kernel.pair_offset, 1)  # (n, 1, D)
        self.frequency_bias = self.per_row(kernel.frequency_bias, 1)  # (n, 1, R)
        self.smoothing = self.per_row(kernel.smoothing, 2)  # (n, 1, 1)
        if self.smoothing is not None:
            # The features leave out the factor 1/R, so that the constant takes R: a common factor cancels.
            self.smoothing = self.smoothing * call.num_projections
        self._dropped = None if call.key_mask is None else ~self._per_key(call.key_mask)
        # Most rows have no padding. To look costs little, but for a GPU, which would have to be waited for.
        if self._dropped is not None and self._dropped.device.type == "cpu" and not bool(self._dropped.any()):
            self._dropped = None
        self._key_bias = None if call.key_bias is None else self._per_key(call.key_bias).to(self.dtype)

    # Parameters.

    def _of_heads(self, parameter: Tensor | None) -> Tensor | None:
        """(H or 1, ...) -> (heads of the tile or 1, ...) in the working precision."""
        if parameter is None:
            return None
        return (parameter[self._heads] if parameter.shape[0] > 1 else parameter).to(self.dtype)

    def per_row(self, parameter: Tensor | None, unsqueeze: int = 0) -> Tensor | None:
        """(H or 1, ...) -> (n, [1, ...,] ...) in the working precision, with that many axes of one after the first."""
        heads = self._of_heads(parameter)
        if heads is None:
            return None
        rows = heads.unsqueeze(1).expand(self.num_heads, self.num_batch, *heads.shape[1:])
        return rows.reshape(self.num_rows, *[1] * unsqueeze, *heads.shape[1:])

    def add_to_parameter(self, gradient: Tensor, rows: Tensor) -> None:
        """Add gradients of rows or heads (n or heads or 1, ...) to that of the parameter they are of, (H or 1, ...)."""
        if rows.shape[0] == self.num_rows:
            rows = rows.view(self.num_heads, self.num_batch, *rows.shape[1:]).sum(1)
        if gradient.shape[0] > 1:
            gradient[self._heads] += rows
        else:
            gradient += rows.sum(0, keepdim=True)

    # Sequences and states.

    def rows(self, x: Tensor) -> Tensor:
        """(B, H, ...) -> (n, ...) in the working precision."""
        return x[self._batch, self._heads].to(self.dtype).transpose(0, 1).reshape(self.num_rows, *x.shape[2:])

    def room(self, place: Tensor) -> Tensor:
        """Return room for rows (n, ...) that are to be written to a tensor (B, H, ...): its own memory if they stand
        there as they stand here."""
        rows = place[self._batch, self._heads].transpose(0, 1)
        if rows.is_contiguous() and rows.dtype == self.dtype:
            return rows.view(self.num_rows, *place.shape[2:])
        return torch.empty(self.num_rows, *place.shape[2:], dtype=self.dtype, device=place.device)

    def write(self, place: Tensor, rows: Tensor) -> None:
        """Write rows (n, ...) to a tensor (B, H, ...)."""
        if rows._base is not None and rows._base is (place if place._base is None else place._base):
            return  # they are in its room
        by_head = rows.reshape(self.num_heads, self.num_batch, *rows.shape[1:])
        place[self._batch, self._heads] = by_head.transpose(0, 1)

    def multiply_into(self, place: Tensor, left: Tensor, right: Tensor, *, divisor: Tensor | None = None) -> None:
        """Write the product of two batches of matrices (n, ., .), over a divisor (n, ., 1), to a place (B, H, ., .)."""
        rows = place[self._batch, self._heads]
        direct = self.num_batch == 1 and place.dtype == left.dtype
        product = torch.bmm(left, right, out=rows[0]) if direct else torch.bmm(left, right)
        if divisor is not None:
            product.div_(divisor)
        if not direct:
            self.write(place, product)

    def chunk(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return positions start to stop of a (B, H, length, .) tensor as (n, chunk, .)."""
        return self.rows(x[:, :, start:stop])

    def queries(self, start: int, stop: int) -> Tensor:
        assert self.call.q is not None
        return self.chunk(self.call.q, start, stop)

    def keys(self, start: int, stop: int) -> Tensor:
        """Return the keys of a chunk, padding replaced by zeros."""
        assert self.call.k is not None
        return self._kept(self.chunk(self.call.k, start, stop), start, stop)

    def values(self, start: int, stop: int) -> Tensor:
        """Return the values of a chunk, padding replaced by zeros."""
        assert self.call.v is not None
        return self._kept(self.chunk(self.call.v, start, stop), start, stop)

    def _kept(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x if self._dropped is None else x.masked_fill(self._dropped[:, start:stop], 0)

    # Keys.

    def dropped(self, start: int, stop: int) -> Tensor | None:
        """Return where a key is padding, (n, chunk, 1); None where no key can be."""
        return None if self._dropped is None else self._dropped[:, start:stop]

    def log_weights(self, keys: Tensor, start: int, stop: int) -> Tensor | None:
        """Return the log-weights (n, chunk, 1) of keys (n, chunk, D): the bias and the envelope of the norms, and -inf
        where there is no key; None where all are 0. The simplex envelope is not in it."""
        bias = None if self._key_bias is None else self._key_bias[:, start:stop]
        if coefficient := self.call.kernel.norm_coefficient:
            squares = borrow("squares", tuple(keys.shape), keys, keys.dtype)
            norms = torch.mul(keys, keys, out=squares).sum(-1, keepdim=True).mul_(-coefficient)
            bias = norms if bias is None else norms.add_(bias)
        if self._dropped is None:
            return bias
        bias = self.new_zeros(stop - start, 1) if bias is None else bias
        return bias.masked_fill(self._dropped[:, start:stop], -torch.inf)

    @property
    def has_weights(self) -> bool:
        """Whether keys may weigh other than 1."""
        return self._key_bias is not None or self._dropped is not None

    def _per_key(self, x: Tensor) -> Tensor:
        """(B or 1, H or 1, S) -> (n, S, 1)."""
        batch = x[self._batch] if x.shape[0] > 1 else x
        rows = batch[:, self._heads] if x.shape[1] > 1 else batch
        by_head = rows.expand(self.num_batch, self.num_heads, x.shape[2]).transpose(0, 1)
        return by_head.reshape(self.num_rows, x.shape[2], 1)

    def add_to_keys(self, gradient: Tensor, rows: Tensor, start: int, stop: int) -> None:
        """Add the gradients of a chunk (n, chunk, 1) to that of log-weights of keys, (B or 1, H or 1, S)."""
        per_head = rows.view(self.num_heads, self.num_batch, -1).transpose(0, 1)
        if gradient.shape[1] == 1:
            per_head = per_head.sum(1, keepdim=True)
        if gradient.shape[0] == 1:
            per_head = per_head.sum(0, keepdim=True)
        batch = self._batch if gradient.shape[0] > 1 else slice(None)
        heads = self._heads if gradient.shape[1] > 1 else slice(None)
        gradient[batch, heads, start:stop] += per_head

    # Products with frequencies.

    def project(self, x: Tensor, omega: Tensor, out: Tensor) -> Tensor:
        """Return the scores (n, chunk, R) of x (n, chunk, D) on frequencies (heads or 1, R, D), written to `out`."""
        x, _ = self._by_head(x, omega)
        torch.bmm(x, omega.transpose(1, 2), out=out.view(omega.shape[0], -1, omega.shape[1]))
        return out

    def back_project(
        self, d_scores: Tensor, omega: Tensor, place: Tensor, more: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Write the gradient of what was projected to a place (B, H, ., D); `more` are two factors of what it has
        besides, broadcastable to (n, chunk, D)."""
        by_head, (rows, length) = self._by_head(d_scores, omega)
        room = place[self._batch, self._heads]
        direct = self.num_batch == 1 and omega.shape[0] == rows and place.dtype == self.dtype
        product = torch.bmm(by_head, omega, out=room[0]) if direct else torch.bmm(by_head, omega).view(rows, length, -1)
        if more is not None:
            product.addcmul_(*more)
        if not direct:
            self.write(place, product)

    def add_gradient_of_frequencies(self, gradient: Tensor, d_scores: Tensor, x: Tensor) -> None:
        """Add to the gradient (heads or 1, R, D) of the frequencies that x (n, chunk, D) was projected on."""
        gradient.baddbmm_(self._by_head(d_scores, gradient)[0].transpose(1, 2), self._by_head(x, gradient)[0])

    @staticmethod
    def _by_head(x: Tensor, omega: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """(n, chunk, .) -> (heads or 1, rows x chunk, .), one matrix for each of the frequencies."""
        return x.reshape(omega.shape[0], -1, x.shape[2]), (x.shape[0], x.shape[1])

    def new_zeros(self, *shape: int) -> Tensor:
        """Return zeros (n, *shape) in the working precision."""
        return torch.zeros(self.num_rows, *shape, dtype=self.dtype, device=self.call.device)


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
        self._flat = borrow(use, (tile.num_rows * chunk * width,), tile.call.tokens, tile.dtype)

    def tokens_first(self, length: int) -> Tensor:
        """Return (n, length, width), uninitialised."""
        return self._flat[: self._rows * length * self._width].view(self._rows, length, self._width)

    def features_first(self, length: int) -> Tensor:
        """Return (n, width, length), uninitialised."""
        return self._flat[: self._rows * length * self._width].view(self._rows, self._width, length)


def chunk_bounds(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive chunks that cover 0 .. length."""
    for start in range(0, length, chunk):
        yield start, min(start + chunk, length)
