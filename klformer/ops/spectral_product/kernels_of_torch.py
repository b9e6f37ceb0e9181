"""torch's fused softmax attentions, one interface: the result with its log-sum, and the gradients from both.

`scaled_dot_product_attention` chooses among these and hides the log-sum. All are called without scale, mask, dropout.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten


class FusedSoftmax(Protocol):
    """softmax(q k^T) v; all operands (B, H, length, width) of one width, a multiple of `multiple`."""

    multiple: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and the log-sum of each query's scores (B, H, length of q)."""

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""


def fused_softmax(device: torch.device, dtype: torch.dtype) -> FusedSoftmax:
    """The kernel for a device and a precision."""
    if device.type == "cpu":
        return FlashForCpu()
    return FlashForCuda() if dtype in (torch.float16, torch.bfloat16) else EfficientForCuda()


class FlashForCpu:
    """Every precision."""

    multiple = 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not (q.numel() and k.numel()):
            return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=1.0)
        return out, log_sum

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not (q.numel() and k.numel()):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        d_q, d_k, d_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, log_sum.to(torch.promote_types(q.dtype, torch.float32)), 0.0, False, scale=1.0
        )
        return d_q, d_k, d_v


class FlashForCuda:
    """Half precision."""

    multiple = 8

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sum, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=1.0)
        return out, log_sum

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout: of no effect
        d_q, d_k, d_v = _aten._scaled_dot_product_flash_attention_backward(
            d_out,
            q,
            k,
            v,
            out,
            log_sum.float(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            False,
            nothing,
            nothing,
            scale=1.0,
        )
        return d_q, d_k, d_v


class EfficientForCuda:
    """float32, and half precision where flash attention is not to be had."""

    multiple = 8
    #: Log-sums come in rows that are a multiple of this long.
    _ALIGNED = 32

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sum, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=1.0)
        return out, log_sum[..., : q.shape[2]]

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        missing = -q.shape[2] % self._ALIGNED
        aligned = pad(log_sum.float(), (0, missing), value=torch.inf)
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, None, out, aligned, nothing, nothing, 0.0, [True, True, True, False], scale=1.0
        )
        return gradients[0], gradients[1], gradients[2]
