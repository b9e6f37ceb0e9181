"""Kernels in closed form: what the estimates are estimates of. Every function takes q (..., L, D) and k (..., S, D)
and gives (..., L, S).

No scaling of the inputs is applied here; attention multiplies queries and keys by D^(-1/4) first.
"""

import torch
from torch import Tensor


def gaussian_kernel(q: Tensor, k: Tensor, lengthscale: float = 1.0) -> Tensor:
    """exp(-|q - k|^2 / (2 l^2)): RKS with omega ~ N(0, I / l^2), and PRF with c = 1 and omega ~ N(0, I) for l = 1."""
    difference = q.unsqueeze(-2) - k.unsqueeze(-3)
    return (-difference.square().sum(-1) / (2 * lengthscale**2)).exp()


def periodic_kernel(q: Tensor, k: Tensor, frequency: float) -> Tensor:
    """(1 + 1/D sum_i cos(w d_i)) / 2, d = q - k: RKS with frequencies w e_i and a constant of the same weight."""
    difference = q.unsqueeze(-2) - k.unsqueeze(-3)
    return (1 + (frequency * difference).cos().mean(-1)) / 2


def softmax_kernel(q: Tensor, k: Tensor) -> Tensor:
    """exp(q.k): PRF with norm coefficient 1/2 and omega ~ N(0, I)."""
    return (q @ k.transpose(-1, -2)).exp()


def gmm_rks_kernel(q: Tensor, k: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """1/C sum_c exp(-1/2 d^T Sigma_c d) cos(mu_c.d), d = q - k (Eq. 4, real part).

    Args:
        mean: (C, D).
        covariance: (C, D, D).
    """
    difference = (q.unsqueeze(-2) - k.unsqueeze(-3)).unsqueeze(-2)  # (..., L, S, 1, D)
    quadratic = _quadratic_form(difference, covariance)
    return ((-quadratic / 2).exp() * (difference * mean).sum(-1).cos()).mean(-1)


def gmm_prf_kernel(q: Tensor, k: Tensor, mean: Tensor, covariance: Tensor, norm_coefficient: float = 1.0) -> Tensor:
    """1/C sum_c exp(mu_c.o + 1/2 o^T Sigma_c o - c |q|^2 - c |k|^2), o = q + k: the expectation in Eq. 9."""
    total = (q.unsqueeze(-2) + k.unsqueeze(-3)).unsqueeze(-2)
    norms = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
    exponent = (total * mean).sum(-1) + _quadratic_form(total, covariance) / 2 - norm_coefficient * norms.unsqueeze(-1)
    return exponent.exp().mean(-1)


def _quadratic_form(x: Tensor, matrices: Tensor) -> Tensor:
    """x (..., 1, D) and (C, D, D) -> x^T A_c x, (..., C)."""
    return torch.einsum("...d,cde,...e->...c", x.squeeze(-2), matrices, x.squeeze(-2))
