"""The least mean of a query's kernel, where there is smoothing (`operands.py`).

    raised = product + shortfall total        shortfall_i = max(0, FLOOR s - m_i),  m_i = denominator_i / total weight

product is [numerator, denominator] (n, E + 1, chunk) with the smoothing in it, total the sum of [v, 1] over the keys
that a query sees, times their weights, (n, E + 1, chunk or 1), s the smoothing (n, 1, 1). Hardly any query needs it: on
a CPU, where it costs nothing to look, nothing is done then.
"""

import torch
from torch import Tensor

from klformer.ops.spectral_product.operands import FLOOR


def raised(product: Tensor, total: Tensor, smoothing: Tensor) -> Tensor:
    """The product with what its queries lack. Overwrites the product."""
    missing = _shortfall(product[:, -1:], total, smoothing)
    return product if _nowhere(missing) else product.addcmul_(missing, total)


def raised_denominator(denominator: Tensor, total: Tensor, smoothing: Tensor) -> Tensor:
    """The last row of `raised`, (n, 1, chunk)."""
    return torch.maximum(denominator, FLOOR * smoothing * total[:, -1:])


def raised_vjp(
    d_product: Tensor, denominator: Tensor, total: Tensor, smoothing: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Turn the gradient of what was raised into that of the product, in place.

    Args:
        d_product: (n, E + 1, chunk).
        denominator: Before it was raised, (n, 1, chunk).

    Returns:
        The gradients of the total, for each query (n, E + 1, chunk), and of the smoothing, (n, 1, chunk); None where
        nothing was raised.
    """
    missing = _shortfall(denominator, total, smoothing)
    if _nowhere(missing):
        return None
    weight = _weight(total)
    d_missing = (d_product * total).sum(1, keepdim=True) * (missing > 0)
    d_total = d_product * missing
    d_total[:, -1:] += d_missing * denominator / weight.square()
    d_product[:, -1:] -= d_missing / weight
    return d_total, d_missing * FLOOR


def _shortfall(denominator: Tensor, total: Tensor, smoothing: Tensor) -> Tensor:
    return (FLOOR * smoothing - denominator / _weight(total)).clamp_(min=0)


def _weight(total: Tensor) -> Tensor:
    """The weight of all keys; 1 where there is none."""
    weight = total[:, -1:]
    return weight.masked_fill(weight == 0, 1)


def _nowhere(missing: Tensor) -> bool:
    return missing.device.type == "cpu" and not bool(missing.any())
