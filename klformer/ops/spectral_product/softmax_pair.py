"""Bidirectional PRF attention as two softmax attentions through torch's own fused kernels.

    log_mass_r = log sum_j exp(omega_r.k_j + b_j)       mean_r = sum_j softmax_j(omega_r.k_j + b_j) v_j
    out_i = sum_r softmax_r(omega_r.q_i + log_mass_r + a_r) mean_r

First the R frequencies are the queries and read the sequence; then the sequence reads the frequencies. A log-weight is
one more column: b beside k and 1 beside omega; 1 beside q and log_mass + a beside omega.

The first attention has two results, and fused kernels take no gradient of a log-sum. But they use their result only as
sum_e d_out_e out_e, one number a row, from which the gradient of the log-sum is to be subtracted: a column more of
zeros beside v, with minus that gradient in its place in the result and 1 in the gradient, gives all gradients exactly.

In half precision a log-weight is split over columns, high digits first. Kernels take one width for all operands:
columns of zeros fill up the rest. Which kernel: on a CPU torch's flash attention for CPUs, on CUDA its memory-efficient
attention for float32 and its flash attention for half precision. A few calls each way, whatever the length is.

`auto` never computes in half precision: frequencies would be rounded to it, and features are made in float32 at least,
also under autocast. Who wants it asks for `softmax_pair_half` (docs/howto/gpu.md).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from klformer.ops.envelopes import simplex_envelope
from klformer.ops.spectral_product.backends import FusedBackend
from klformer.ops.spectral_product.kernels_of_torch import FusedSoftmax, fused_softmax, has_fused_softmax
from klformer.ops.spectral_product.operands import SpectralOperands

#: Columns that hold a number of the working precision in half precision.
_DIGITS = {torch.float16: 2, torch.bfloat16: 3}
#: A log-weight that stands for none: finite, because a softmax over nothing is not a number.
_NOTHING = {torch.float16: -6e4}
#: The widest head that flash attention on CUDA takes.
MAX_WIDTH = 256


class SoftmaxPairBackend(FusedBackend):
    """Serves bidirectional products of exponential maps.

    Args:
        name: What it is registered as.
        half: Compute in half precision where q, k and v are all stored in one; never by itself. Otherwise in float32 at
            least, as all backends do.
    """

    def __init__(self, name: str, *, half: bool = False) -> None:
        super().__init__(name)
        self._half = half

    def supports(self, operands: SpectralOperands) -> bool:
        # Widths first: lengths may be unknown where a program is exported.
        return (
            operands.feature_map.exponential
            and not operands.causal
            and has_fused_softmax(operands.q.device, self._dtype(operands))
            and max(operands.q.shape[-1], operands.v.shape[-1]) + max(_DIGITS.values()) <= MAX_WIDTH
        )

    def suits(self, operands: SpectralOperands) -> bool:
        """On CUDA, where the chunked product waits for its many launches. On a CPU it is the slower of the two at most
        sizes (docs/efficiency.md)."""
        return operands.q.device.type == "cuda" and not self._half and self.supports(operands)

    def attend(self, operands: SpectralOperands) -> Tensor:
        return super().attend(with_simplex_written_out(operands))

    def empty(self, operands: SpectralOperands) -> list[Tensor]:
        batch, heads, length, _ = operands.q.shape
        num_frequencies, num_values = operands.num_projections, operands.v.shape[-1]
        precise = operands.dtype

        def empty(*shape: int, dtype: torch.dtype = precise) -> Tensor:
            return torch.empty(batch, heads, *shape, dtype=dtype, device=operands.q.device)

        return [
            empty(length, num_values, dtype=operands.v.dtype),
            empty(num_frequencies, num_values, dtype=self._dtype(operands)),
            empty(num_frequencies),
            empty(length),
        ]

    def forward(self, operands: SpectralOperands) -> list[Tensor]:
        call = _Call(operands, self._dtype(operands))
        mean, log_mass = call.kernel.forward(*call.reading())
        out, log_sum = call.kernel.forward(*call.written(mean, log_mass))
        num_values = operands.v.shape[-1]
        kept = [out[..., :num_values].to(operands.v.dtype), mean[..., :num_values]]
        return [x.contiguous() for x in kept] + [x.to(operands.dtype) for x in (log_mass, log_sum)]

    def backward(
        self, operands: SpectralOperands, saved: Sequence[Tensor], d_out: Tensor, needed: Collection[str]
    ) -> dict[str, Tensor]:
        call = _Call(operands, self._dtype(operands))
        out, mean, log_mass, log_sum = saved
        padded_mean = call.padded(mean)
        d_queries, d_frequencies, d_mean = call.kernel.backward(
            call.padded(d_out), *call.written(padded_mean, log_mass), call.padded(out), log_sum
        )
        head_dim, num_values = operands.q.shape[-1], operands.v.shape[-1]
        d_log_mass = d_frequencies[..., head_dim]
        # The gradient of the log-sum goes in through columns of zeros of the values.
        digits = call.columns(-d_log_mass.to(operands.dtype))
        ones = torch.ones_like(digits)
        d_reading, d_keys, d_values = call.kernel.backward(
            call.padded(d_mean[..., :num_values], ones), *call.reading(), call.padded(mean, digits), log_mass
        )
        return call.gradients(
            needed,
            q=d_queries[..., :head_dim],
            k=d_keys[..., :head_dim],
            v=d_values[..., :num_values],
            omega=d_frequencies[..., :head_dim].to(operands.dtype) + d_reading[..., :head_dim],
            frequency_bias=d_log_mass,
            key_bias=d_keys[..., head_dim],
        )

    def _dtype(self, operands: SpectralOperands) -> torch.dtype:
        stored = {operands.q.dtype, operands.k.dtype, operands.v.dtype}
        half = len(stored) == 1 and operands.v.dtype in _DIGITS
        return operands.v.dtype if self._half and half else operands.dtype


def with_simplex_written_out(operands: SpectralOperands) -> SpectralOperands:
    """The same product, with the simplex envelope in `key_bias`, (B, H, S)."""
    if not operands.kernel.simplex or operands.kernel.omega is None:
        return operands
    envelope = simplex_envelope(operands.k, operands.kernel.omega, operands.key_mask)
    bias = envelope if operands.key_bias is None else envelope + operands.key_bias
    return replace(operands, kernel=replace(operands.kernel, simplex=False), key_bias=bias)


@dataclass(frozen=True)
class _Call:
    """The operands of the two attentions, all (B, H, ., width) in the precision that is computed in."""

    operands: SpectralOperands
    dtype: torch.dtype

    @property
    def kernel(self) -> FusedSoftmax:
        return fused_softmax(self.operands.q.device, self.dtype)

    @property
    def width(self) -> int:
        """The width of all operands: that of queries or of values, and columns for a number."""
        widest = max(self.operands.q.shape[-1], self.operands.v.shape[-1]) + _DIGITS.get(self.dtype, 1)
        return -(-widest // self.kernel.multiple) * self.kernel.multiple

    def columns(self, x: Tensor) -> Tensor:
        """Numbers (B, H, length) as columns (B, H, length, 1 or more) whose sum they are."""
        x, found = x.clamp(min=_NOTHING.get(self.dtype, -1e30)), []
        for _ in range(_DIGITS.get(self.dtype, 1)):
            found.append(x.to(self.dtype))
            x = x - found[-1]
        return torch.stack(found, dim=-1)

    def padded(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """x and some columns, filled up with zeros."""
        x = x.to(self.dtype)
        x = x if columns is None else torch.cat([x, columns], dim=-1)
        return pad(x, (0, self.width - x.shape[-1]))

    def reading(self) -> tuple[Tensor, Tensor, Tensor]:
        """Frequencies as queries, keys and values."""
        operands = self.operands
        k, v = operands.k, operands.v
        bias = operands.key_bias
        if operands.key_mask is not None:
            dropped = ~operands.key_mask
            k, v = (x.masked_fill(dropped.unsqueeze(-1), 0) for x in (k, v))
            bias = k.new_zeros(1, 1, k.shape[2], dtype=operands.dtype) if bias is None else bias.to(operands.dtype)
            bias = bias.masked_fill(dropped, -torch.inf)
        if bias is None:
            bias = k.new_zeros(1, 1, k.shape[2], dtype=operands.dtype)
        columns = self.columns(bias.to(operands.dtype).expand(k.shape[:3]))
        return self.padded(self._omega(), self._ones(operands.num_projections)), self.padded(k, columns), self.padded(v)

    def written(self, mean: Tensor, log_mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, frequencies as keys, and their means."""
        operands, bias = self.operands, self.operands.kernel.frequency_bias
        column = log_mass.to(operands.dtype)
        column = column if bias is None else column + bias.to(operands.dtype)
        ones = self._ones(operands.q.shape[2])
        return self.padded(operands.q, ones), self.padded(self._omega(), self.columns(column)), mean

    def _ones(self, length: int) -> Tensor:
        """What columns of numbers are multiplied by."""
        batch, heads = self.operands.q.shape[:2]
        one = self.operands.q.new_ones((), dtype=self.dtype)
        return one.expand(batch, heads, length, _DIGITS.get(self.dtype, 1))

    def _omega(self) -> Tensor:
        omega = self.operands.kernel.omega
        assert omega is not None
        return omega.expand(*self.operands.q.shape[:2], *omega.shape[1:])

    def gradients(self, needed: Collection[str], **found: Tensor) -> dict[str, Tensor]:
        """Gradients in the shapes of the operands, added up over what broadcasts; none of what is not there."""
        tensors = self.operands.tensors()
        if self.operands.key_mask is not None:
            dropped = ~self.operands.key_mask.unsqueeze(-1)
            found["k"], found["v"] = (found[name].masked_fill(dropped, 0) for name in ("k", "v"))
            found["key_bias"] = found["key_bias"].masked_fill(dropped.squeeze(-1), 0)
        result = {}
        for name, gradient in found.items():
            if name not in tensors or (name not in needed and name not in ("q", "k", "v")):
                continue
            if name in ("omega", "frequency_bias"):
                gradient = gradient.sum(0)
            result[name] = gradient.sum_to_size(tensors[name].shape).to(tensors[name].dtype).contiguous()
        return result
