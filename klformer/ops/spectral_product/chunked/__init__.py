"""The product in cache-sized chunks of plain PyTorch: every map, causal and not, on any device.

Memory is O(L (D + E)) whatever the number of features is: features are made chunk by chunk, and made again in backward.
A GPU keeps those of RKS instead, where they take no more than KEEP_BYTES in all. On a CPU that gains nothing: memory
that is new costs as much as a sine (docs/efficiency.md).
"""

from collections.abc import Collection, Sequence
from typing import Literal

from torch import Tensor

from klformer.ops.spectral_product.backends import FusedBackend
from klformer.ops.spectral_product.chunked import causal, few, plain, positive
from klformer.ops.spectral_product.chunked.tiling import Cut, causal_cut, cut
from klformer.ops.spectral_product.operands import SpectralOperands

Recompute = Literal["auto", "always", "never"]
#: Features of queries and keys together that a call may keep for its backward.
KEEP_BYTES = 32 * 2**20


class ChunkedBackend(FusedBackend):
    """Serves every call.

    Args:
        name: What it is registered as.
        chunk: Tokens worked on at a time; chosen by size and device if None. Changes speed, and results only by
            rounding.
        recompute: Whether backward makes the features of a bidirectional RKS product again. "auto" keeps them on a
            GPU if they fit KEEP_BYTES.
    """

    def __init__(self, name: str, *, chunk: int | None = None, recompute: Recompute = "auto") -> None:
        super().__init__(name)
        self._chunk = chunk
        self._recompute = recompute

    def supports(self, operands: SpectralOperands) -> bool:
        return True

    def empty(self, operands: SpectralOperands) -> list[Tensor]:
        if operands.causal:
            return causal.empty(operands, causal_cut(operands, chunk=self._chunk))
        if few.serves(operands):
            return few.empty(operands)
        if operands.feature_map.exponential:
            return positive.empty(operands)
        return plain.empty(operands, keep=self._keeps(operands))

    def forward(self, operands: SpectralOperands) -> list[Tensor]:
        if operands.causal:
            return causal.forward(operands, causal_cut(operands, chunk=self._chunk))
        if few.serves(operands):
            return few.forward(operands, self._cut_for_few(operands))
        pieces = cut(operands, chunk=self._chunk)
        if operands.feature_map.exponential:
            return positive.forward(operands, pieces)
        return plain.forward(operands, pieces, keep=self._keeps(operands))

    def backward(
        self, operands: SpectralOperands, saved: Sequence[Tensor], d_out: Tensor, needed: Collection[str]
    ) -> dict[str, Tensor]:
        if operands.causal:
            return causal.backward(operands, list(saved), d_out, needed, causal_cut(operands, chunk=self._chunk))
        if few.serves(operands):
            return few.backward(operands, list(saved), d_out, needed, self._cut_for_few(operands))
        way = positive if operands.feature_map.exponential else plain
        return way.backward(operands, list(saved), d_out, needed, cut(operands, chunk=self._chunk))

    def _cut_for_few(self, operands: SpectralOperands) -> Cut:
        return cut(operands, chunk=self._chunk, width=operands.num_projections)

    def _keeps(self, operands: SpectralOperands) -> bool:
        if self._recompute != "auto":
            return self._recompute == "never"
        if operands.q.device.type == "cpu" or operands.kernel.omega is None:
            return False
        batch, heads, length, _ = operands.q.shape
        tokens = batch * heads * (length + operands.k.shape[2])
        return bool(tokens * operands.num_features * operands.dtype.itemsize <= KEEP_BYTES)
