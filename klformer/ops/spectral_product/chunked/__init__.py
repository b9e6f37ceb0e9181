"""The product in cache-sized chunks of plain PyTorch: every map, every step, on any device.

Memory is O(L (D + E)) whatever the number of features is: features are made chunk by chunk, and made again in backward.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from klformer.ops.spectral_product.autograd import FusedBackend
from klformer.ops.spectral_product.chunked import causal, exponential, features, one_query
from klformer.ops.spectral_product.chunked.tiles import causal_cut, cut
from klformer.ops.spectral_product.operands import Call


class ChunkedBackend(FusedBackend):
    """Serves every call.

    Args:
        chunk: Tokens worked on at a time; chosen by size and device if None. Changes speed, and results only by
            rounding.
    """

    priority = 0

    def __init__(self, *, chunk: int | None = None) -> None:
        self._chunk = chunk

    def supports(self, call: Call) -> str | None:
        return None

    def product(self, call: Call) -> tuple[Tensor, Tensor]:
        if not one_query.serves(call):
            return super().product(call)
        out, log_sum, *_ = self.run(call)
        return out, log_sum

    def empty_kept(self, call: Call) -> list[Tensor]:
        if call.step == "product":
            return one_query.empty_kept(call)
        if call.step == "causal":
            return causal.Kept.empty(call, causal_cut(call, chunk=self._chunk)).as_list()
        if call.feature_map.exponential:
            return exponential.empty_envelopes(call) if call.step == "absorb" else []
        return features.empty_kept(call) if call.step == "read" else []

    def forward(self, call: Call, *, keep: bool) -> list[Tensor]:
        if call.step == "causal":
            return causal.forward(call, causal_cut(call, chunk=self._chunk), keep=keep)
        way, pieces = exponential if call.feature_map.exponential else features, cut(call, chunk=self._chunk)
        if call.step == "product":
            return one_query.forward(call, pieces)
        return way.absorb(call, pieces) if call.step == "absorb" else way.read(call, pieces)

    def backward(
        self, call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
    ) -> dict[str, Tensor]:
        given = call, outputs, d_results, needed
        if call.step == "causal":
            return causal.backward(*given, causal_cut(call, chunk=self._chunk))
        way, pieces = exponential if call.feature_map.exponential else features, cut(call, chunk=self._chunk)
        if call.step == "product":
            return one_query.backward(*given, pieces)
        return (way.absorb_backward if call.step == "absorb" else way.read_backward)(*given, pieces)
