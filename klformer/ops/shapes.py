"""What the operands of any attention must look like; the one place where that is said."""

import torch
from torch import Tensor

from klformer.errors import ArgumentError


def check_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    num_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
) -> None:
    """Check queries (B, H, L, D), keys (B, H, S, D), values (B, H, S, E) and a mask (B, S) against each other.

    Args:
        num_heads: H that they must have; any if None. Likewise `head_dim` D and `value_dim` E.

    Raises:
        ArgumentError: something does not fit; the message names it.
    """
    heads = q.shape[1] if num_heads is None and q.dim() == 4 else num_heads
    size = q.shape[3] if head_dim is None and q.dim() == 4 else head_dim
    for name, tensor, width in (("q", q, size), ("k", k, size), ("v", v, value_dim)):
        wrong = tensor.dim() != 4 or tensor.shape[1] != heads or (width is not None and tensor.shape[3] != width)
        if wrong:
            shape = f"(batch, {heads or 'heads'}, length, {width or 'size'})"
            raise ArgumentError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ArgumentError(f"{name} must be of a floating-point type, got {tensor.dtype}")
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[2] != v.shape[2]:
        raise ArgumentError(
            "q, k and v must have the same batch size, and k and v the same length, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    check_key_mask(key_mask, k)
    if causal and q.shape[2] != k.shape[2]:
        raise ArgumentError(f"causal needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}")


def check_key_mask(key_mask: Tensor | None, k: Tensor) -> None:
    """Raises ArgumentError unless `key_mask` is None or a bool tensor (B, S) for the keys (B, H, S, D)."""
    if key_mask is not None and (key_mask.shape != (k.shape[0], k.shape[2]) or key_mask.dtype != torch.bool):
        raise ArgumentError(
            f"key_mask must be a bool tensor of shape {(k.shape[0], k.shape[2])} (True = keep), "
            f"got {key_mask.dtype} of shape {tuple(key_mask.shape)}"
        )


def check_key_bias(key_bias: Tensor | None, k: Tensor) -> None:
    """Raises ArgumentError unless `key_bias` is None or floating-point (B or 1, H or 1, S) for keys (B, H, S, D)."""
    if key_bias is None:
        return
    batch, heads, length, _ = k.shape
    fits = (
        key_bias.dim() == 3
        and key_bias.shape[0] in (1, batch)
        and key_bias.shape[1] in (1, heads)
        and key_bias.shape[2] == length
    )
    if not fits or not key_bias.is_floating_point():
        raise ArgumentError(
            f"key_bias must be floating-point and ({batch} or 1, {heads} or 1, {length}), "
            f"got {key_bias.dtype} of shape {tuple(key_bias.shape)}"
        )
