"""The product in cache-sized chunks of plain PyTorch: every map, every step, on any device.

Memory is O(L (D + E)) whatever the number of features is: features are made chunk by chunk, and made again in backward.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from klformer.ops.spectral_product.autograd import FusedBackend
from klformer.ops.spectral_product.chunked import causal, exponential, features, pairs
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

    def serves_whole(self, call: Call) -> bool:
        return pairs.serves(call)

    def among_others(self, call: Call, outputs: Sequence[Tensor], out: Tensor, log_sum: Tensor) -> list[Tensor]:
        found, is_causal = [out, log_sum, *outputs[2:]], call.step == "causal"
        if not is_causal and self.serves_whole(call):
            return [out, log_sum, outputs[2], outputs[1]]
        if is_causal or not call.feature_map.exponential:
            place = 5 if is_causal else 2  # of the denominators
            larger = outputs[place] * (log_sum - outputs[1]).exp()
            found[place] = larger.masked_fill(outputs[place] == 0, 0)
        return found

    def empty_kept(self, call: Call) -> list[Tensor]:
        if call.step == "causal":
            return causal.Kept.empty(call, causal_cut(call, chunk=self._chunk)).as_list()
        if call.step == "product":
            return pairs.empty_kept(call)
        if call.feature_map.exponential:
            return exponential.empty_envelopes(call) if call.step == "absorb" else []
        return features.empty_kept(call) if call.step == "read" else []

    def forward(self, call: Call, *, keep: bool) -> list[Tensor]:
        if call.step == "causal":
            return causal.forward(call, causal_cut(call, chunk=self._chunk), keep=keep)
        way, pieces = exponential if call.feature_map.exponential else features, cut(call, chunk=self._chunk)
        if call.step == "product":
            return pairs.forward(call, pieces)
        return way.absorb(call, pieces) if call.step == "absorb" else way.read(call, pieces)

    def backward(
        self, call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
    ) -> dict[str, Tensor]:
        given = call, outputs, d_results, needed
        if call.step == "causal":
            return causal.backward(*given, causal_cut(call, chunk=self._chunk))
        way, pieces = exponential if call.feature_map.exponential else features, cut(call, chunk=self._chunk)
        if call.step == "product":
            return pairs.backward(*given, pieces)
        return (way.absorb_backward if call.step == "absorb" else way.read_backward)(*given, pieces)
