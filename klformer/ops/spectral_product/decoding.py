"""One token at a time: a state that is changed in place, and a step that absorbs a token and reads with its query.

The same sums as everywhere (`operands.py`), values and weights in one tensor, so that a step takes few calls. The
frequencies are computed once, are shared by all sequences of a batch and never copied. For inference: no gradients.
"""

from typing import Any

import torch
from torch import Tensor

from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.dispatch import choose_backend
from klformer.ops.spectral_product.operands import FLOOR, Call, SpectralKernel, Sums
from klformer.ops.spectral_product.state import KernelState, read

#: How far a score may be above its log-scale before the state is made to refer to a larger one: far from the largest
#: number, so that this is rare.
MAX_RISE = 20.0


class DecodingState(KernelState):
    """A state that `absorb` and `step` change in place.

    Args:
        state: What was absorbed before; it is copied.

    Examples:
        >>> import torch, klformer
        >>> from klformer.ops.spectral_product.decoding import DecodingState
        >>> kernel = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8).kernel.present()
        >>> sizes = {"batch_size": 1, "num_heads": 2, "value_dim": 8}
        >>> state = DecodingState(klformer.KernelState.empty(kernel, like=torch.empty(8), **sizes))
        >>> for q, k, v in torch.randn(5, 3, 1, 2, 1, 8):
        ...     out, _ = state.step(q, k, v)
        >>> out.shape
        torch.Size([1, 2, 1, 8])
    """

    @torch.no_grad()
    def __init__(self, state: KernelState) -> None:
        kernel, (values, weights, log_scale) = state.kernel, state.sums
        self._joined = torch.cat([values, weights.unsqueeze(-1)], -1)  # (B, H, F, E + 1)
        sums = Sums(self._joined[..., :-1], self._joined[..., -1], log_scale.clone())
        super().__init__(_detached(kernel, values.dtype), sums)
        omega = self.kernel.omega
        self._omega = None if omega is None else omega.transpose(1, 2).contiguous()  # (H or 1, D, R)
        self._one = values.new_ones(1, 1, 1, 1)
        #: Whether the log-scale is known to be 0 (not for exponential maps).
        self._unscaled = False

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodingState, (KernelState(self.kernel, Sums(*(x.clone() for x in self.sums))),)

    def absorb_(self, k: Tensor, v: Tensor, **options: Any) -> KernelState:
        self._unscaled = False
        return super().absorb_(k, v, **options)

    absorb = absorb_

    @torch.no_grad()
    def step(
        self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None, *, backend: str = "auto"
    ) -> tuple[Tensor, Tensor]:
        """Absorb one token and read with its query.

        Args:
            q: (B, H, 1, D).
            k: (B, H, 1, D).
            v: (B, H, 1, E).
            key_bias: The log-weight of the key besides the envelope of the kernel, (B or 1, H or 1, 1), finite.
            backend: As in `spectral_product`; `chunked` has this way of one token.

        Returns:
            (B, H, 1, E) in the type of q, and the log-sum (B, H, 1).

        Raises:
            ArgumentError: the state is for another number of sequences.
        """
        self._check_batch(q)
        if not q.shape[0]:
            return torch.zeros_like(v), self._joined.new_zeros(q.shape[:3])
        if choose_backend(Call("absorb", self.kernel, k=k, v=v, key_bias=key_bias), backend).name != "chunked":
            return read(self.kernel, q, self.absorb(k, v, key_bias=key_bias, backend=backend), backend=backend)
        with full_precision(k):
            dtype = self._joined.dtype
            pair, value = torch.cat([q, k], dim=2).to(dtype), v.to(dtype)
            value = torch.cat([value, self._one.expand(*v.shape[:3], 1)], dim=-1)  # (B, H, 1, E + 1)
            step = self._exponential if self.kernel.feature_map.exponential else self._features
            product, scale = step(pair, value, None if key_bias is None else key_bias.to(dtype))
            # The key that was just absorbed is there: the denominator is not that of no key.
            log_sum = product[..., -1].log().add_(scale).sub_(self.kernel.log_normaliser)
            return (product[..., :-1] / product[..., -1:]).to(q.dtype), log_sum

    def _exponential(self, pair: Tensor, value: Tensor, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return [numerator, denominator], (B, H, 1, E + 1), of a query and a key (B, H, 2, D), and the logarithm that
        they are relative to, (B, H, 1)."""
        kernel, log_scale = self.kernel, self.sums.log_scale
        query, key = _by_head(pair, self._omega).unbind(2)  # (B, H, R)
        if kernel.norm_coefficient:
            key = torch.sub(key, pair[:, :, 1].square().sum(-1, keepdim=True), alpha=kernel.norm_coefficient)
        if kernel.simplex:
            key = key.log_softmax(-1).add_(kernel.log_normaliser)
        if key_bias is not None:
            key = key + key_bias
        rise = key - log_scale
        if rise.device.type != "cpu" or float(rise.amax()) > MAX_RISE:
            raised = torch.maximum(log_scale, key)
            self._joined.mul_((log_scale - raised).exp_().unsqueeze(-1))
            log_scale.copy_(raised)
            rise = key - raised
        self._joined.addcmul_(rise.exp_().unsqueeze(-1), value)
        query = query + log_scale
        if kernel.frequency_bias is not None:
            query = query + kernel.frequency_bias
        largest = query.amax(-1, keepdim=True)
        return query.sub_(largest).exp_().unsqueeze(2) @ self._joined, largest

    def _features(self, pair: Tensor, value: Tensor, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `_exponential`, for other maps."""
        kernel = self.kernel
        phi = kernel.feature_map.explicit(pair if self._omega is None else _by_head(pair, self._omega))
        query, key = phi[:, :, :1], phi[:, :, 1:]  # (B, H, 1, F)
        if kernel.frequency_bias is not None:
            query = query * kernel.frequency_bias.exp().repeat(1, kernel.feature_map.parts).unsqueeze(1)
        if kernel.pair_offset is not None:
            angle = pair @ kernel.pair_offset.unsqueeze(-1)  # (B, H, 2, 1)
            cos, sin = angle.cos(), angle.sin()
            query = torch.cat([query * cos[:, :, :1], query * sin[:, :, :1]], -1)
            key = torch.cat([key * cos[:, :, 1:], key * sin[:, :, 1:]], -1)
        if kernel.smoothing is not None:
            key = torch.cat([key, self._one.expand(*key.shape[:3], 1)], -1)
        value = self._weighted(value, key_bias)
        self._joined.addcmul_(key.transpose(2, 3), value)
        if kernel.smoothing is None or self._omega is None:
            return query @ self._joined, self.sums.log_scale
        total = self._joined[:, :, -1:]
        product, smoothing = query @ self._joined[:, :, :-1], kernel.smoothing[:, None, None] * self._omega.shape[2]
        # The smoothing, or as much more as leaves no mean below half of it (`operands.py`).
        added = torch.maximum(smoothing, FLOOR * smoothing - product[..., -1:] / total[..., -1:])
        return product.addcmul_(total, added), self.sums.log_scale

    def _weighted(self, value: Tensor, key_bias: Tensor | None) -> Tensor:
        """Return [v, 1] times the weight of its key; the state refers to a larger one if it has to."""
        if key_bias is None and self._unscaled:
            return value
        log_scale, bias = self.sums.log_scale, value.new_zeros(1, 1, 1) if key_bias is None else key_bias
        raised = torch.maximum(log_scale, bias)
        self._joined.mul_((log_scale - raised).exp_().unsqueeze(-1))
        log_scale.copy_(raised)
        self._unscaled = key_bias is None and raised.device.type == "cpu" and not bool(raised.any())
        return value * (bias - raised).exp_().unsqueeze(-1)


def _detached(kernel: SpectralKernel, dtype: torch.dtype) -> SpectralKernel:
    """Return a copy of a kernel in the precision of a state."""
    return kernel.with_tensors({name: x.detach().to(dtype, copy=True) for name, x in kernel.tensors().items()})


def _by_head(x: Tensor, matrix: Tensor | None) -> Tensor:
    """Return x (B, H, S, D) times one matrix a head, (H or 1, D, R), without a copy of it for every sequence."""
    assert matrix is not None
    batch, heads, length, _ = x.shape
    if matrix.shape[0] == 1:
        return x @ matrix[0]
    if batch == 1:
        return torch.bmm(x[0], matrix).unsqueeze(0)
    by_head = torch.bmm(x.transpose(0, 1).reshape(heads, batch * length, -1), matrix)
    return by_head.view(heads, batch, length, -1).transpose(0, 1)
