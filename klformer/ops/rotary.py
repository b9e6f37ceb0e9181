"""Rotary positions: queries and keys are rotated by their position, so that scores see only the difference.

Channels i and i + D/2 of x are the coordinates of a point in the plane, which is turned by the angle p theta_i at
position p, with theta_i = 10,000^(-2i/D) (Su et al., RoFormer; the pairing is that of GPT-NeoX and Llama). Then
<rotate(q, p), rotate(k, s)> depends on p - s alone. Norms do not change. If D is odd, the last channel is left alone.
"""

import math

import torch
from torch import Tensor


def places(length: int, key_mask: Tensor | None = None, *, first: int | Tensor = 0, device: torch.device) -> Tensor:
    """Return the positions of tokens, (L,), or (B, L) by a mask: what it leaves out takes none, wherever it is.

    Args:
        length: L.
        key_mask: (B, L), True = keep.
        first: Position of the first token: one for all, or (B,).
        device: Where they are wanted.
    """
    offsets = torch.arange(length, device=device) if key_mask is None else key_mask.long().cumsum(1) - 1
    found = offsets + (first.unsqueeze(-1) if isinstance(first, Tensor) and first.dim() else first)
    return found if key_mask is None else found.clamp(min=0)


def rotate(x: Tensor, positions: int | Tensor = 0) -> Tensor:
    """Rotate every token of x (..., L, D) by its position, in float32 at least.

    Args:
        positions: Of all tokens, broadcastable to (..., L); or of x[..., 0, :], which the others follow.

    Returns:
        (..., L, D), of the type of x.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    if isinstance(positions, int):
        positions = places(x.shape[-2], first=positions, device=x.device)
    rates = torch.exp(torch.arange(half, device=x.device).to(dtype) * (-math.log(10_000.0) / max(half, 1)))
    angles = positions.to(dtype).unsqueeze(-1) * rates  # (..., L, D/2)
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = x[..., :half].to(dtype), x[..., half : 2 * half].to(dtype), x[..., 2 * half :].to(dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1).to(x.dtype)
