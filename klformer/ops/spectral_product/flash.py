"""Absorb and read for an exponential map through torch's own fused attention.

    log_scale_r = log sum_j exp(omega_r.k_j + b_j)      values_r = sum_j softmax_j(omega_r.k_j + b_j) v_j      absorb
    out_i = sum_r softmax_r(omega_r.q_i + log_scale_r + a_r) values_r                                          read

First the R frequencies are the queries and read the sequence; then the sequence reads the frequencies. A log-weight is
one more column: b beside k and 1 beside omega; 1 beside q and log_scale + a beside omega.

Both attentions have two results, and fused kernels take no gradient of a log-sum. But they use their result only as
sum_e d_out_e out_e, one number a row, from which the gradient of the log-sum is to be subtracted: a column more of
zeros beside v, with minus that gradient in its place in the result and 1 in the gradient, gives all gradients exactly.

In half precision a log-weight is split over columns, high digits first. Kernels take one width for all operands:
columns of zeros fill up the rest. Which kernel: on a CPU torch's flash attention for CPUs, on CUDA its memory-efficient
attention for float32 and its flash attention for half precision. A few calls each way, whatever the length is.

`auto` takes this on CUDA, and never in half precision: frequencies would be rounded to it, and features are made in
float32 at least. Who wants that asks for `flash_half`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from klformer.ops.envelopes import gaussian_envelope, simplex_envelope
from klformer.ops.spectral_product.autograd import FusedBackend
from klformer.ops.spectral_product.fused_softmax import FusedSoftmax, fused_softmax, has_fused_softmax
from klformer.ops.spectral_product.operands import NO_KEY, Call

#: Columns that hold a number of the working precision in half precision.
DIGITS = {torch.float16: 2, torch.bfloat16: 3}
#: A log-weight that stands for none: finite, because a softmax over nothing is not a number.
NOTHING = {torch.float16: -6e4}
#: The widest head that flash attention on CUDA takes.
MAX_WIDTH = 256


class FlashBackend(FusedBackend):
    """Serves what is not causal, of exponential maps.

    Args:
        priority: As in `Backend`.
        on_cpu: Serve calls on a CPU, where `chunked` is the faster of the two at most sizes.
        half: Compute in half precision where operands are stored in one. Otherwise in float32 at least.
    """

    def __init__(self, *, priority: int, on_cpu: bool = True, half: bool = False) -> None:
        self.priority = priority
        self._on_cpu, self._half = on_cpu, half

    def supports(self, call: Call) -> str | None:
        dtype = self._dtype(call)
        if not call.feature_map.exponential:
            return f"feature_map {call.feature_map.name!r} is not exponential"
        if call.step == "causal":
            return "it has no causal form"
        if call.device.type == "cpu" and not self._on_cpu:
            return "it is for CUDA; on a CPU there is 'flash_cpu'"
        if not has_fused_softmax(call.device, dtype):
            return f"torch has no fused attention for {dtype} on {call.device.type}"
        if max(call.head_dim, call.value_dim) + max(DIGITS.values()) > MAX_WIDTH:
            return f"heads are wider than {MAX_WIDTH - max(DIGITS.values())}"
        return None

    def run(self, call: Call) -> Sequence[Tensor]:
        return super().run(call if call.k is None else with_envelope_written_out(call))

    def forward(self, call: Call, *, keep: bool) -> list[Tensor]:
        columns = _Columns(call, self._dtype(call))
        if call.step == "absorb":
            call = with_envelope_written_out(call)
            mean, log_scale = columns.kernel.forward(*columns.absorbing(call))
            log_scale = log_scale.to(call.dtype)
            least = NOTHING.get(self._dtype(call), NO_KEY) / 2
            none = (log_scale < least) | (call.tokens.shape[2] == 0)
            return [
                mean[..., : call.value_dim].to(call.dtype),
                (~none).to(call.dtype),
                log_scale.masked_fill(none, NO_KEY),
            ]
        assert call.q is not None
        mean, log_mass, _ = _latents(call)
        out, log_sum = columns.kernel.forward(*columns.reading(mean, log_mass))
        log_sum = log_sum.to(call.dtype) - call.kernel.log_normaliser
        no_key = (log_mass < NO_KEY / 2).all(-1, keepdim=True)
        out = out[..., : call.value_dim].to(call.q.dtype).contiguous()
        return [out, log_sum.masked_fill(no_key, -torch.inf)]

    def backward(
        self, call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
    ) -> dict[str, Tensor]:
        columns, head_dim, num_values = _Columns(call, self._dtype(call)), call.head_dim, call.value_dim
        if call.step == "absorb":
            mean, weights, log_scale = outputs
            log_scale = log_scale.masked_fill(weights == 0, torch.inf)  # without any key all weights are 0
            d_mean = torch.zeros_like(mean) if d_results[0] is None else d_results[0]
            d_log_scale = (d_mean * mean).sum(-1)
            d_log_scale = d_log_scale if d_results[1] is None else d_log_scale + d_results[1]
            d_omega, d_keys, d_values = columns.backward(columns.absorbing(call), mean, log_scale, d_mean, d_log_scale)
            d_bias = d_keys[..., head_dim]
            found = {"k": d_keys[..., :head_dim], "v": d_values[..., :num_values], "key_bias": d_bias}
            if call.key_mask is not None:
                found = {
                    n: x.masked_fill(~call.key_mask[(...,) + (None,) * (x.dim() - 3)], 0) for n, x in found.items()
                }
            return _summed(call, needed, found | {"omega": d_omega[..., :head_dim]})
        assert call.sums is not None
        mean, log_mass, inverse = _latents(call)
        out, log_sum = outputs
        d_out = torch.zeros_like(out) if d_results[0] is None else d_results[0]
        d_log_sum = torch.zeros_like(log_sum) if d_results[1] is None else d_results[1]
        log_sum = log_sum.masked_fill(log_sum == -torch.inf, torch.inf) + call.kernel.log_normaliser
        d_q, d_omega, d_mean = columns.backward(columns.reading(mean, log_mass), out, log_sum, d_out, d_log_sum)
        d_log_mass, d_mean = d_omega[..., head_dim].to(call.dtype), d_mean[..., :num_values].to(call.dtype)
        d_weights = d_log_mass - (d_mean * mean).sum(-1)
        if inverse is not None:
            d_mean, d_weights = d_mean * inverse.unsqueeze(-1), d_weights * inverse
        sums = {"values": d_mean, "weights": d_weights, "log_scale": d_log_mass}
        found = {"q": d_q[..., :head_dim], "omega": d_omega[..., :head_dim], "frequency_bias": d_log_mass}
        return _summed(call, needed, found | sums)

    def _dtype(self, call: Call) -> torch.dtype:
        stored = {x.dtype for x in (call.q, call.k, call.v) if x is not None}
        half = len(stored) == 1 and call.tokens.dtype in DIGITS
        return call.tokens.dtype if self._half and half else call.dtype


def with_envelope_written_out(call: Call) -> Call:
    """Return the same call, with the envelope of its kernel in `key_bias`, (B, H, S)."""
    kernel, biases = call.kernel, [] if call.key_bias is None else [call.key_bias]
    assert call.k is not None
    if kernel.simplex and kernel.omega is not None:
        biases.append(simplex_envelope(call.k, kernel.omega, call.key_mask))
    if kernel.norm_coefficient:
        biases.append(gaussian_envelope(call.k, kernel.norm_coefficient, call.key_mask))
    bias = sum(biases[1:], start=biases[0]) if biases else None
    return replace(call, kernel=replace(kernel, simplex=False, norm_coefficient=0.0), key_bias=bias)


def _latents(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the mean value of every frequency (B, H, R, E), the logarithm of its weight (B, H, R), and what its sums
    were divided by as a factor (B, H, R), None for 1; without any key 0, `NO_KEY` and 0."""
    assert call.sums is not None
    values, weights, log_mass = (x.to(call.dtype) for x in call.sums)
    inverse, bias = None, call.kernel.frequency_bias
    if not call.just_absorbed:
        none = weights == 0
        inverse = weights.masked_fill(none, 1).reciprocal()
        values, log_mass = values * inverse.unsqueeze(-1), log_mass - inverse.log()
        inverse = inverse.masked_fill(none, 0)
    return values, log_mass if bias is None else log_mass + bias.to(call.dtype), inverse


def _summed(call: Call, needed: Collection[str], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients in the shapes of the tensors that need them, added up over what broadcasts."""
    tensors = call.tensors()
    return {
        name: x.sum_to_size(tensor.shape)
        for name, x in found.items()
        if name in needed and (tensor := tensors[name]) is not None
    }


class _Columns:
    """The operands of the two attentions, all (B, H, ., width) in the precision that is computed in."""

    def __init__(self, call: Call, dtype: torch.dtype) -> None:
        self._call, self._dtype = call, dtype
        self.kernel: FusedSoftmax = fused_softmax(call.device, dtype)
        self._digits = DIGITS.get(dtype, 1)
        widest = max(call.head_dim, call.value_dim) + self._digits
        self._width = -(-widest // self.kernel.multiple) * self.kernel.multiple
        self._zero, self._one = torch.arange(2, dtype=dtype, device=call.device)

    def absorbing(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return frequencies as queries, keys and values."""
        assert call.k is not None
        assert call.v is not None
        k, v = call.k, call.v
        bias = k.new_zeros(1, 1, k.shape[2]) if call.key_bias is None else call.key_bias
        bias = bias.to(call.dtype)
        if call.key_mask is not None:
            dropped = ~call.key_mask
            k, v = (x.masked_fill(dropped.unsqueeze(-1), 0) for x in (k, v))
            bias = bias.masked_fill(dropped, -torch.inf)
        return self._padded(self._omega(), self._ones(call.num_projections)), self._weighted(k, bias), self._padded(v)

    def reading(self, mean: Tensor, log_mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, frequencies as keys, and their means as values."""
        q = self._call.q
        assert q is not None
        return self._padded(q, self._ones(q.shape[2])), self._weighted(self._omega(), log_mass), self._padded(mean)

    def backward(
        self, given: tuple[Tensor, Tensor, Tensor], out: Tensor, log_sum: Tensor, d_out: Tensor, d_log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of what one attention was given."""
        digits = self._split(-d_log_sum)
        return self.kernel.backward(
            self._padded(d_out, self._one.expand(digits.shape)), *given, self._padded(out, digits), log_sum
        )

    def _weighted(self, x: Tensor, log_weights: Tensor) -> Tensor:
        """Return keys with their log-weights (., ., length) beside them."""
        return self._padded(x, self._split(log_weights.expand(x.shape[:3])))

    def _split(self, x: Tensor) -> Tensor:
        """Return numbers (B, H, length) as columns (B, H, length, 1 or more) whose sum they are."""
        x = x.clamp(min=NOTHING.get(self._dtype, NO_KEY)).unsqueeze(-1)
        found = [x.to(self._dtype)]
        while len(found) < self._digits:
            x = x - found[-1]
            found.append(x.to(self._dtype))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _padded(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """Return x and some columns, filled up with zeros."""
        x = x.to(self._dtype)
        if columns is None:
            return pad(x, (0, self._width - x.shape[-1]))
        missing = self._width - x.shape[-1] - columns.shape[-1]
        return torch.cat([x, columns, self._zero.expand(*x.shape[:-1], missing)], dim=-1)

    def _ones(self, length: int) -> Tensor:
        """Return what columns of numbers are multiplied by."""
        call = self._call
        return self._one.expand(call.batch_size, call.num_heads, length, self._digits)

    def _omega(self) -> Tensor:
        omega = self._call.kernel.omega
        assert omega is not None
        return omega.expand(self._call.batch_size, self._call.num_heads, *omega.shape[1:])
