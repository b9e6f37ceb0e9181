"""The same attention written down plainly in O(L^2): the oracles of tests and analysis. Never used to train.

Eq. 1 of the paper: out_i = sum_j kappa(q_i, k_j) v_j / sum_j kappa(q_i, k_j).
"""

import torch
from torch import Tensor
from torch.nn.functional import elu


def tied_frequencies(omega: Tensor, mean: Tensor) -> Tensor:
    """(H, R, D) and (H, D) -> the 2 R frequencies omega + mean and omega - mean."""
    return torch.cat([omega + mean.unsqueeze(-2), omega - mean.unsqueeze(-2)], dim=-2)


def log_positive_kernel(q: Tensor, k: Tensor, omega: Tensor, norm_coefficient: float = 1.0) -> Tensor:
    """log of (1/R) sum_r exp(omega_r.(q + k) - c |q|^2 - c |k|^2), (B, H, L, S); no exponential is ever taken alone."""
    scores_q = q @ omega.transpose(-1, -2) - norm_coefficient * q.square().sum(-1, keepdim=True)
    scores_k = k @ omega.transpose(-1, -2) - norm_coefficient * k.square().sum(-1, keepdim=True)
    rows = [(scores_q[..., i, None, :] + scores_k).logsumexp(-1) for i in range(q.shape[-2])]
    count = torch.tensor(float(omega.shape[-2]), dtype=q.dtype)
    if not rows:
        return q.new_zeros(*q.shape[:-1], k.shape[-2])
    return torch.stack(rows, dim=-2) - count.log()


def kernel_matrix(
    q: Tensor,
    k: Tensor,
    omega: Tensor | None,
    *,
    feature_map: str,
    mean: Tensor | None = None,
    norm_coefficient: float = 1.0,
    smoothing: float = 0.0,
) -> Tensor:
    """kappa(q_i, k_j) for all pairs, (B, H, L, S)."""
    if omega is None:
        return (elu(q) + 1) @ (elu(k) + 1).transpose(-1, -2)
    if mean is not None:
        omega = tied_frequencies(omega, mean)
    if feature_map == "prf":
        return log_positive_kernel(q, k, omega, norm_coefficient).exp()
    angles_q, angles_k = q @ omega.transpose(-1, -2), k @ omega.transpose(-1, -2)
    cosines = angles_q.cos() @ angles_k.cos().transpose(-1, -2) + angles_q.sin() @ angles_k.sin().transpose(-1, -2)
    return cosines / omega.shape[-2] + smoothing


def visible_pairs(num_queries: int, num_keys: int, key_mask: Tensor | None, causal: bool) -> Tensor:
    """True where a query may see a key, broadcastable to (B, H, L, S)."""
    visible = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool)
    if causal:
        visible = visible.tril()
    return visible if key_mask is None else visible & key_mask[:, None, None]


def attention_from_kernel(kernel: Tensor, v: Tensor, *, key_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Eq. 1 for a given kernel matrix (B, H, L, S)."""
    kernel = kernel * visible_pairs(kernel.shape[-2], kernel.shape[-1], key_mask, causal)
    total = kernel.sum(-1, keepdim=True)
    return kernel @ v / total.masked_fill(total == 0, 1)


def attention_from_log_kernel(
    log_kernel: Tensor, v: Tensor, *, key_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Eq. 1 for the logarithm of a positive kernel, for kernels that under- or overflow."""
    visible = visible_pairs(log_kernel.shape[-2], log_kernel.shape[-1], key_mask, causal)
    log_kernel = log_kernel.masked_fill(~visible, -torch.inf)
    # A row without any key has no logarithm of its sum; its weights are exp(-inf) = 0 whatever is subtracted.
    total = log_kernel.logsumexp(-1, keepdim=True)
    return (log_kernel - total.masked_fill(total == -torch.inf, 0)).exp() @ v
