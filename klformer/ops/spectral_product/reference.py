"""The same attention written down plainly in O(L^2): the definition, and the oracle of tests and analysis.

Eq. 1 of the paper: out_i = sum_j w_j kappa(q_i, k_j) v_j / sum_j w_j kappa(q_i, k_j). Plain PyTorch, so that autograd
derives every gradient. A state has no definition of its own: what is absorbed and read is left to `plain`.
"""

import torch
from torch import Tensor
from torch.nn.functional import elu

from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.operands import FLOOR, Call, Sums, paired_frequencies
from klformer.ops.spectral_product.plain import PlainBackend


class ReferenceBackend(PlainBackend):
    """Eq. 1 through the whole kernel matrix (B, H, L, S)."""

    priority = -20

    def product(self, call: Call) -> tuple[Tensor, Tensor]:
        with full_precision(call.tokens):
            return _attend(call, causal=False)

    def causal(self, call: Call) -> tuple[Tensor, Tensor, Sums]:
        if call.sums is not None:
            return super().causal(call)
        with full_precision(call.tokens):
            return *_attend(call, causal=True), self.absorb(call)


def _attend(call: Call, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the result in the type of q, and its log-sums."""
    assert call.q is not None
    assert call.k is not None
    assert call.v is not None
    kernel, dtype = call.kernel, call.dtype
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    if call.key_mask is not None:
        # What is not there must not be looked at: a weight of 0 does not protect from inf or nan.
        k, v = (x.masked_fill(~call.key_mask.unsqueeze(-1), 0) for x in (k, v))
    key_bias = torch.zeros(1, 1, k.shape[2], dtype=dtype, device=k.device)
    if call.key_bias is not None:
        key_bias = call.key_bias.to(dtype)
    if kernel.norm_coefficient:
        key_bias = key_bias - kernel.norm_coefficient * k.square().sum(-1)
    visible = visible_pairs(q.shape[2], k.shape[2], call.key_mask, causal, device=q.device)
    log_weights = key_bias.unsqueeze(-2).masked_fill(~visible, -torch.inf)  # (B, H, L, S)
    if kernel.omega is None:
        out, log_sum = attention_from_kernel((elu(q) + 1) @ (elu(k) + 1).transpose(-1, -2), log_weights, v)
        return out.to(call.q.dtype), log_sum
    omega = kernel.omega.to(dtype)
    frequency_bias = omega.new_zeros(1, omega.shape[1]) if kernel.frequency_bias is None else kernel.frequency_bias
    frequency_bias = frequency_bias.to(dtype)
    if kernel.pair_offset is not None:
        omega = paired_frequencies(omega, kernel.pair_offset.to(dtype))
        frequency_bias = torch.cat([frequency_bias, frequency_bias], dim=-1)
    if kernel.simplex:
        key_means = (k @ omega.transpose(-1, -2)).logsumexp(-1).unsqueeze(-2) - kernel.log_normaliser
        log_weights = (log_weights - key_means).masked_fill(~visible, -torch.inf)
    if kernel.feature_map.exponential:
        out, log_sum = attention_from_log_kernel(log_positive_kernel(q, k, omega, frequency_bias), log_weights, v)
        return out.to(call.q.dtype), log_sum
    cosines, smoothing = cosine_kernel(q, k, omega, frequency_bias), None
    if kernel.smoothing is not None:
        smoothing = kernel.smoothing.to(dtype)[:, None, None]
        cosines = cosines + smoothing
    out, log_sum = attention_from_kernel(cosines, log_weights, v, smoothing)
    return out.to(call.q.dtype), log_sum


def cosine_kernel(q: Tensor, k: Tensor, omega: Tensor, frequency_bias: Tensor) -> Tensor:
    """(1/R) sum_r exp(a_r) cos(omega_r.(q - k)), (B, H, L, S)."""
    angles_q, angles_k = q @ omega.transpose(-1, -2), k @ omega.transpose(-1, -2)
    weights = frequency_bias.exp().unsqueeze(-2) / omega.shape[-2]
    cosines = (angles_q.cos() * weights) @ angles_k.cos().transpose(-1, -2)
    return cosines + (angles_q.sin() * weights) @ angles_k.sin().transpose(-1, -2)


def log_positive_kernel(q: Tensor, k: Tensor, omega: Tensor, frequency_bias: Tensor) -> Tensor:
    """log of (1/R) sum_r exp(a_r + omega_r.(q + k)), (B, H, L, S); no exponential is ever taken alone."""
    scores_q = q @ omega.transpose(-1, -2) + frequency_bias.unsqueeze(-2)
    scores_k = k @ omega.transpose(-1, -2)
    rows = [(scores_q[..., i, None, :] + scores_k).logsumexp(-1) for i in range(q.shape[-2])]
    if not rows:
        return q.new_zeros(*q.shape[:-1], k.shape[-2])
    return torch.stack(rows, dim=-2) - torch.tensor(float(omega.shape[-2]), dtype=q.dtype).log()


def visible_pairs(
    num_queries: int, num_keys: int, key_mask: Tensor | None, causal: bool, *, device: torch.device | None = None
) -> Tensor:
    """True where a query may see a key, broadcastable to (B, H, L, S); key_mask (B or 1, H or 1, S)."""
    visible = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
    if causal:
        visible = visible.tril()
    return visible if key_mask is None else visible & key_mask.unsqueeze(-2)


def attention_from_kernel(
    kernel: Tensor, log_weights: Tensor, v: Tensor, smoothing: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Eq. 1 for a kernel matrix (B, H, L, S) and log-weights that broadcast to it, -inf for keys that are not seen.

    Args:
        smoothing: The part of the kernel that is constant, (H or 1, 1, 1): its half is the least mean of a row.

    Returns:
        The result (B, H, L, E), and the logarithm of what was divided by, (B, H, L).
    """
    largest = log_weights.detach().amax(-1, keepdim=True) if log_weights.shape[-1] else log_weights.new_zeros(())
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = (log_weights - largest).exp()
    weighted = kernel * weights
    total = weighted.sum(-1, keepdim=True)
    if smoothing is not None:
        whole = weights.sum(-1, keepdim=True)
        mean = total / whole.masked_fill(whole == 0, 1)
        weighted = weighted + (FLOOR * smoothing - mean).clamp(min=0) * weights
        total = weighted.sum(-1, keepdim=True)
    none = total == 0
    total = total.masked_fill(none, 1)
    log_sum = (total.log() + largest).masked_fill(none, -torch.inf)
    return weighted @ v / total, log_sum.squeeze(-1)


def attention_from_log_kernel(log_kernel: Tensor, log_weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 1 for the logarithm of a positive kernel, for kernels that under- or overflow; as `attention_from_kernel`."""
    # Filled, not only added: no gradient comes from what is not seen.
    logs = (log_kernel + log_weights).masked_fill(log_weights == -torch.inf, -torch.inf)
    # A row without any key has no logarithm of its sum; its weights are exp(-inf) = 0 whatever is subtracted.
    total = logs.logsumexp(-1, keepdim=True)
    return (logs - total.masked_fill(total == -torch.inf, 0)).exp() @ v, total.squeeze(-1)
