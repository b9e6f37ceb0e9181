"""Where no gradient is wanted: nothing is kept, and who computes is decided when the op runs.

A program that is traced for export then holds one op whose result is as long as the queries, and no assumption on the
length: it runs from one token to as many as memory holds.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.spectral_product.backends import FusedBackend
from klformer.ops.spectral_product.chunked import ChunkedBackend
from klformer.ops.spectral_product.operands import SpectralOperands
from klformer.ops.spectral_product.softmax_pair import SoftmaxPairBackend, with_simplex_written_out


class InferenceBackend(FusedBackend):
    """Serves every call without gradients; what `auto` takes for those, and while a program is exported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._chunked = ChunkedBackend(name, recompute="always")
        self._softmax_pair = SoftmaxPairBackend(name)

    def supports(self, operands: SpectralOperands) -> bool:
        return torch.compiler.is_exporting() or not operands.wants_gradients

    def empty(self, operands: SpectralOperands) -> list[Tensor]:
        shape = (*operands.q.shape[:3], operands.v.shape[-1])
        return [torch.empty(shape, dtype=operands.v.dtype, device=operands.q.device)]

    def forward(self, operands: SpectralOperands) -> list[Tensor]:
        if self._softmax_pair.suits(operands):
            return self._softmax_pair.forward(with_simplex_written_out(operands))[:1]
        return self._chunked.forward(operands)[:1]

    def backward(
        self, operands: SpectralOperands, saved: Sequence[Tensor], d_out: Tensor, needed: Collection[str]
    ) -> dict[str, Tensor]:
        raise ArgumentError(
            "an exported product has no gradients: it was traced for inference; train the model that it was made of"
        )
