"""The backend `triton`: which calls it serves. Imports no Triton before it is used."""

import os
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from klformer.ops.spectral_product.autograd import FusedBackend
from klformer.ops.spectral_product.operands import Call

#: Feature maps that there are kernels for.
MAPS = ("prf", "rks")
#: The widest queries, keys and values.
MAX_WIDTH = 128


class TritonBackend(FusedBackend):
    """Serves random features on a GPU, every step: after `flash`, which is torch's own, and before `chunked`."""

    priority = 5

    def supports(self, call: Call) -> str | None:
        if call.feature_map.name not in MAPS:
            return f"feature_map {call.feature_map.name!r} has no kernels"
        return why_not(call.tokens, call.dtype, call.value_dim)

    def empty_kept(self, call: Call) -> list[Tensor]:
        return _launches(call).empty_kept(call)

    def forward(self, call: Call, *, keep: bool) -> list[Tensor]:
        return _launches(call).forward(call)

    def backward(
        self, call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
    ) -> dict[str, Tensor]:
        found = _launches(call).backward(call, outputs, d_results, needed)
        tensors = call.tensors()
        return {
            name: x.sum_to_size(y.shape)
            for name, x in found.items()
            if name in needed and (y := tensors[name]) is not None
        }


def why_not(tokens: Tensor, dtype: torch.dtype, value_dim: int) -> str | None:
    """Return the reason why there are no kernels for tokens (B, H, L, D); None if there are."""
    if not _is_installed():
        return "triton is not installed: pip install 'klformer[triton]'"
    if tokens.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it is for GPUs, not for {tokens.device.type}"
    if dtype.itemsize > 4:
        return f"it computes in float32, not in {dtype}"
    if max(tokens.shape[3], value_dim) > MAX_WIDTH:
        return f"heads are wider than {MAX_WIDTH}"
    return "there are no tokens" if tokens.numel() == 0 else None


def _launches(call: Call) -> Any:
    """Return the module that launches the kernels of a call's map. Imports Triton."""
    return import_module(f"klformer.ops.triton.{call.feature_map.name}_calls")


_FOUND: list[bool] = []


def _is_installed() -> bool:
    """Return whether there is Triton; looked for once."""
    if not _FOUND:
        _FOUND.append(find_spec("triton") is not None)
    return _FOUND[0]
