"""How the product is cut up: tiles of (batch, head) rows, chunks of the sequence, and the operands of each piece.

A tile is a few (batch, head) rows that are worked on together; the sequence of a tile is walked through in chunks.
Both are sized so that the features of a chunk stay in cache, and nothing that is made for a chunk outlives it. `Tile`
hands out the operands of a chunk ready for use: in the working precision, padding removed, and values with their
column of ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.feature_maps import FeatureMap

#: Features of one chunk of a tile, in bytes: what the caches hold on a CPU, what keeps a GPU busy.
CPU_CHUNK_BYTES = 2 * 2**20
GPU_CHUNK_BYTES = 64 * 2**20
#: Chunk lengths in tokens: below the first, calls cost more than arithmetic; above the second, nothing is gained.
MIN_CHUNK, MAX_CHUNK = 32, 1024


@dataclass(frozen=True)
class Problem:
    """One call of the product: its operands and what to do with them. Shapes as in `spectral_product`."""

    q: Tensor
    k: Tensor
    v: Tensor
    omega: Tensor | None
    mean: Tensor | None
    key_mask: Tensor | None
    feature_map: FeatureMap
    smoothing: float

    @property
    def dtype(self) -> torch.dtype:
        """The working precision: at least float32, whatever the operands are stored in."""
        operands = torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), self.v.dtype)
        return torch.promote_types(operands, torch.float32)

    @property
    def num_projections(self) -> int:
        return self.q.shape[-1] if self.omega is None else self.omega.shape[-2]

    @property
    def num_features(self) -> int:
        return self.feature_map.copies * self.num_projections

    @property
    def value_columns(self) -> int:
        """Columns W of the weighted values: the values and a one, twice where a tied mean splits them in two."""
        return (self.v.shape[-1] + 1) * (1 if self.mean is None else 2)

    def tiles(self, chunk: int) -> "Iterator[Tile]":
        """The (batch, head) rows in groups; a group is whole batch entries, or some heads of one."""
        batch, heads = self.q.shape[:2]
        budget = CPU_CHUNK_BYTES if self.q.device.type == "cpu" else GPU_CHUNK_BYTES
        rows = max(1, budget // (chunk * self.num_features * self.dtype.itemsize))
        if rows >= heads:
            step = max(1, rows // max(1, heads))
            for start in range(0, batch, step):
                yield Tile(self, slice(start, min(start + step, batch)), slice(0, heads))
            return
        # Equal groups: 8 heads that fit 7 at a time go as 4 + 4.
        groups = -(-heads // rows)
        step = -(-heads // groups)
        for entry in range(batch):
            for start in range(0, heads, step):
                yield Tile(self, slice(entry, entry + 1), slice(start, min(start + step, heads)))


class Tile:
    """Some (batch, head) rows of a problem; n of them."""

    def __init__(self, problem: Problem, batch: slice, heads: slice) -> None:
        self.problem = problem
        self.batch, self.heads = batch, heads
        num_batch, num_heads = batch.stop - batch.start, heads.stop - heads.start
        self.num_rows = num_batch * num_heads
        total_heads = problem.q.shape[1]
        first = batch.start * total_heads + heads.start
        #: Where the rows stand in a (B * H, ...) view of a result.
        self.rows = slice(first, first + self.num_rows)
        self.omega = None if problem.omega is None else self._per_row(problem.omega)  # (n, R, D)
        self.mean = None if problem.mean is None else self._per_row(problem.mean.unsqueeze(-2))  # (n, 1, D)
        self._keep: Tensor | None = None
        if problem.key_mask is not None:
            keep = problem.key_mask[batch]
            self._keep = keep[:, None].expand(num_batch, num_heads, keep.shape[-1]).reshape(self.num_rows, -1, 1)

    def _per_row(self, parameter: Tensor) -> Tensor:
        """(H or 1, ., D) -> (n, ., D) in the working precision."""
        heads = parameter[self.heads] if parameter.shape[0] > 1 else parameter
        num_batch = self.batch.stop - self.batch.start
        num_heads = self.heads.stop - self.heads.start
        rows = heads.to(self.problem.dtype).expand(num_batch, num_heads, *parameter.shape[1:])
        return rows.reshape(self.num_rows, *parameter.shape[1:])

    def add_to_parameter(self, gradient: Tensor, rows: Tensor) -> None:
        """Add the gradients of the rows (n, ., D) to that of the parameter they came from, (H or 1, ., D)."""
        num_batch = self.batch.stop - self.batch.start
        per_head = rows.view(num_batch, -1, *rows.shape[1:]).sum(0)
        if gradient.shape[0] > 1:
            gradient[self.heads] += per_head
        else:
            gradient += per_head.sum(0, keepdim=True)

    def chunk(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Positions start to stop of a (B, H, length, .) tensor as (n, chunk, .), in the working precision."""
        piece = tensor[self.batch, self.heads, start:stop]
        return piece.to(self.problem.dtype).reshape(self.num_rows, stop - start, tensor.shape[-1])

    def dropped(self, start: int, stop: int) -> Tensor | None:
        """True where a key is padding, (n, chunk, 1); None where no key can be."""
        return None if self._keep is None else ~self._keep[:, start:stop]

    def queries(self, start: int, stop: int) -> Tensor:
        return self.chunk(self.problem.q, start, stop)

    def keys(self, start: int, stop: int) -> Tensor:
        """Keys of a chunk, padding replaced by zeros."""
        keys = self.chunk(self.problem.k, start, stop)
        dropped = self.dropped(start, stop)
        return keys if dropped is None else keys.masked_fill(dropped, 0)

    def values(self, start: int, stop: int) -> Tensor:
        """[v, 1] of a chunk, (n, chunk, E + 1), padding replaced by zeros."""
        piece = self.problem.v[self.batch, self.heads, start:stop]
        num_values = piece.shape[-1]
        values = torch.empty(*piece.shape[:3], num_values + 1, dtype=self.problem.dtype, device=piece.device)
        values[..., :num_values] = piece
        values[..., num_values] = 1
        values = values.view(self.num_rows, stop - start, num_values + 1)
        dropped = self.dropped(start, stop)
        return values if dropped is None else values.masked_fill_(dropped, 0)

    def key_scores(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Scores of a chunk of keys. An exponential map gives padding the feature exp(-inf) = 0."""
        scores = self.problem.feature_map.key_scores(keys, self.omega)
        dropped = self.dropped(start, stop)
        if dropped is not None and self.problem.feature_map.exponential:
            scores.masked_fill_(dropped, -torch.inf)
        return scores

    def angle(self, x: Tensor) -> Tensor | None:
        """b = x.mean, (n, chunk, 1), where the spectrum is a tied pair of components at +mean and -mean."""
        return None if self.mean is None else (x * self.mean).sum(-1, keepdim=True)


def chunk_bounds(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive chunks that cover 0 .. length."""
    for start in range(0, length, chunk):
        yield start, min(start + chunk, length)
