"""The backend `triton`: which calls it serves. Imports no Triton before it is used."""

import os
from collections.abc import Collection, Sequence
from importlib.util import find_spec

from torch import Tensor

from klformer.ops.spectral_product.autograd import FusedBackend
from klformer.ops.spectral_product.operands import Call

#: The widest queries, keys and values.
MAX_WIDTH = 128


class TritonBackend(FusedBackend):
    """Serves exponential maps on a GPU, every step: after `flash`, which is torch's own, and before `chunked`."""

    priority = 5

    def supports(self, call: Call) -> str | None:
        if not _is_installed():
            return "triton is not installed: pip install 'klformer[triton]'"
        if not call.feature_map.exponential:
            return f"feature_map {call.feature_map.name!r} is not exponential"
        if call.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"it is for GPUs, not for {call.device.type}"
        if call.dtype.itemsize > 4:
            return f"it computes in float32, not in {call.dtype}"
        if max(call.head_dim, call.value_dim) > MAX_WIDTH:
            return f"heads are wider than {MAX_WIDTH}"
        if call.tokens.numel() == 0:
            return "there are no tokens"
        return None

    def empty_kept(self, call: Call) -> list[Tensor]:
        from klformer.ops.triton import launches

        return launches.empty_kept(call)

    def forward(self, call: Call, *, keep: bool) -> list[Tensor]:
        from klformer.ops.triton import launches

        return launches.forward(call)

    def backward(
        self, call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
    ) -> dict[str, Tensor]:
        from klformer.ops.triton import launches

        found = launches.backward(call, outputs, d_results)
        tensors = call.tensors()
        return {
            name: x.sum_to_size(y.shape)
            for name, x in found.items()
            if name in needed and (y := tensors[name]) is not None
        }


_FOUND: list[bool] = []


def _is_installed() -> bool:
    """Return whether there is Triton; looked for once."""
    if not _FOUND:
        _FOUND.append(find_spec("triton") is not None)
    return _FOUND[0]
