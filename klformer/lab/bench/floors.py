"""Floors of the op benchmark: the matrix products of the product alone, and nothing else.

`with_ones` is the floor that figures have always been compared with: values have a column of ones beside them, which a
matrix product pays dearly, and every product gets new memory. `lean` has neither: what is left for a product that
normalises without a column of ones and uses its memory again. It is what no arrangement of these products gets below.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from klformer.lab.bench.sizes import Sizes

#: Features of a chunk in bytes, and the longest chunk; the same for both.
CHUNK_BYTES, MAX_CHUNK, MIN_CHUNK = 2 * 2**20, 1024, 32


def matrix_products(sizes: Sizes, *, parts: int, lean: bool) -> Callable[[], None]:
    """Forward and backward of one call, in pieces that fit caches.

    Args:
        parts: Features of each projection: 2 for sine and cosine, otherwise 1.
        lean: Without the column of ones, and into memory that is used again.
    """
    rows, frequencies, width = sizes.batch * sizes.heads, sizes.frequencies, sizes.head_dim
    features = parts * frequencies
    chunk = min(max(MIN_CHUNK, CHUNK_BYTES // (4 * features * min(rows, 8))), MAX_CHUNK, sizes.length)
    tile = max(1, min(rows, CHUNK_BYTES // (4 * features * chunk)))
    columns = sizes.value_dim + (0 if lean else 1)
    batch = tile if lean else parts * tile
    inner = features if lean else frequencies

    def run() -> None:
        for _ in range(0, rows, tile):
            pieces = _Pieces(tile, batch, chunk, frequencies, inner, width, columns, lean)
            for start in range(0, sizes.length, chunk):
                pieces.forward_and_backward(min(chunk, sizes.length - start))

    return run


class _Pieces:
    """The factors of one tile; what they hold does not matter."""

    def __init__(
        self, tile: int, batch: int, chunk: int, frequencies: int, inner: int, width: int, columns: int, lean: bool
    ) -> None:
        self.phi, self.values = torch.ones(batch, chunk, inner), torch.ones(batch, chunk, columns)
        self.d_scores, self.x = torch.ones(tile, chunk, frequencies), torch.ones(tile, chunk, width)
        self.omega, self.d_omega = torch.ones(tile, frequencies, width), torch.zeros(tile, frequencies, width)
        self.state = torch.zeros(batch, inner, columns)
        #: Memory of the results, by what they are.
        self._results: dict[str, Tensor] | None = {} if lean else None

    def forward_and_backward(self, size: int) -> None:
        """All products of a chunk: keys and queries, forward and backward."""
        phi, values, x, d_scores = (t[:, :size] for t in (self.phi, self.values, self.x, self.d_scores))
        for backward in (False, True):
            for absorbs in (True, False):
                self._multiply("scores", x, self.omega.transpose(1, 2))
                if absorbs:
                    self.state.baddbmm_(phi.transpose(1, 2), values)
                else:
                    self._multiply("values", phi, self.state)
                if backward:
                    self._multiply("features", values, self.state.transpose(1, 2))
                    self._multiply("x", d_scores, self.omega)
                    self.d_omega.baddbmm_(d_scores.transpose(1, 2), x)

    def _multiply(self, name: str, left: Tensor, right: Tensor) -> None:
        if self._results is None:
            torch.bmm(left, right)
            return
        size = (left.shape[0], left.shape[1], right.shape[2])
        if name not in self._results or self._results[name].shape != size:
            self._results[name] = left.new_empty(size)
        torch.bmm(left, right, out=self._results[name])
