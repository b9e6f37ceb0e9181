"""The product in cache-sized chunks of plain PyTorch: every map, causal and not, on any device.

Memory is O(L (D + E)) whatever the number of features is: features are made chunk by chunk, and made again in backward.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from klformer.ops.spectral_product.backends import FusedBackend
from klformer.ops.spectral_product.chunked import bidirectional, causal
from klformer.ops.spectral_product.chunked.residuals import Residuals
from klformer.ops.spectral_product.chunked.tiling import default_chunk
from klformer.ops.spectral_product.operands import SpectralOperands


class ChunkedBackend(FusedBackend):
    """Serves every call.

    Args:
        name: What it is registered as.
        chunk: Tokens worked on at a time; chosen by size and device if None. Changes speed, and results only by
            rounding.
    """

    def __init__(self, name: str, *, chunk: int | None = None) -> None:
        super().__init__(name)
        self._chunk = chunk

    def supports(self, operands: SpectralOperands) -> bool:
        return True

    def chunk(self, operands: SpectralOperands) -> int:
        return default_chunk(operands) if self._chunk is None else self._chunk

    def empty(self, operands: SpectralOperands) -> list[Tensor]:
        room = causal.empty(operands, self.chunk(operands)) if operands.causal else bidirectional.empty(operands)
        return room.as_list()

    def forward(self, operands: SpectralOperands) -> list[Tensor]:
        direction = causal if operands.causal else bidirectional
        return direction.forward(operands, self.chunk(operands)).as_list()

    def backward(
        self, operands: SpectralOperands, saved: Sequence[Tensor], d_out: Tensor, needed: Collection[str]
    ) -> dict[str, Tensor]:
        direction = causal if operands.causal else bidirectional
        return direction.backward(operands, Residuals.from_list(saved), d_out, needed, self.chunk(operands))
