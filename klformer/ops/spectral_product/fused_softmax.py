"""torch's fused softmax attentions, one interface: the result with its log-sum, and the gradients from both.

`scaled_dot_product_attention` chooses among these and hides the log-sum. All are called without scale, mask, dropout.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten


class FusedSoftmax(ABC):
    """softmax(q k^T) v; all operands (B, H, length, width) of one width, a multiple of `multiple`.

    torch's kernels are not asked for nothing: without queries or without keys all results are zeros.
    """

    multiple: ClassVar[int]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and the log-sum of each query's scores (B, H, length of q)."""
        if not (q.numel() and k.numel()):
            return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        return self._forward(q, k, v)

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        if not (q.numel() and k.numel()):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return self._backward(d_out, q, k, v, out, log_sum)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` of operands that are not empty."""

    @abstractmethod
    def _backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` of operands that are not empty."""


def fused_softmax(device: torch.device, dtype: torch.dtype) -> FusedSoftmax:
    """The kernel for a device and a precision, for which `has_fused_softmax` is true."""
    if device.type == "cpu":
        return FlashForCpu()
    return FlashForCuda() if dtype in (torch.float16, torch.bfloat16) else EfficientForCuda()


def has_fused_softmax(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel: for CUDA, and tensors without memory that stand for it, up to float32."""
    return device.type == "cpu" or (device.type in ("cuda", "meta") and dtype != torch.float64)


class FlashForCpu(FusedSoftmax):
    """Every precision."""

    multiple = 1

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=1.0)
        return out, log_sum

    def _backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_q, d_k, d_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, log_sum.to(torch.promote_types(q.dtype, torch.float32)), 0.0, False, scale=1.0
        )
        return d_q, d_k, d_v


class FlashForCuda(FusedSoftmax):
    """Half precision."""

    multiple = 8

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sum, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=1.0)
        return out, log_sum

    def _backward(
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


class EfficientForCuda(FusedSoftmax):
    """float32."""

    multiple = 8
    #: Log-sums come in rows that are a multiple of this long.
    _ALIGNED = 32

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sum, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=1.0)
        return out, log_sum[..., : q.shape[2]]

    def _backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        missing = -q.shape[2] % self._ALIGNED
        aligned = pad(log_sum.float(), (0, missing), value=torch.inf)
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, None, out, aligned, nothing, nothing, 0.0, [True, True, True, False], scale=1.0
        )
        return gradients[0], gradients[1], gradients[2]
