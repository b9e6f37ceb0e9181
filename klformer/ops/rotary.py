"""Rotary positions: queries and keys are rotated by their position, so that scores see only the difference.

Channels i and i + D/2 of x are the coordinates of a point in the plane, which is turned by the angle p theta_i at
position p, with theta_i = 10,000^(-2i/D) (Su et al., RoFormer; the pairing is that of GPT-NeoX and Llama). Then
<rotate(q, p), rotate(k, s)> depends on p - s alone. Norms do not change. If D is odd, the last channel is left alone.
"""

import math

import torch
from torch import Tensor


def rotate(x: Tensor, first_position: int | Tensor = 0) -> Tensor:
    """Rotate every token of x (..., L, D) by its position, in float32 at least.

    Args:
        first_position: Position of x[..., 0, :]; the others follow.

    Returns:
        (..., L, D), of the type of x.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    positions = (torch.arange(length, device=x.device) + first_position).to(dtype)
    rates = torch.exp(torch.arange(half, device=x.device).to(dtype) * (-math.log(10_000.0) / max(half, 1)))
    angles = positions.unsqueeze(1) * rates  # (L, D/2)
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = x[..., :half].to(dtype), x[..., half : 2 * half].to(dtype), x[..., 2 * half :].to(dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1).to(x.dtype)
