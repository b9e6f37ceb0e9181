"""Derivatives that fused operations do not have, noticed before a wrong one is given.

Fused operations have a backward of their own and nothing else. Whoever has one asks here whether plain operations are
to take its place: torch derives everything from those.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether forward-mode derivatives of these tensors are taken, or a transform of torch.func is at work."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    # Outside of a level of forward-mode derivatives nothing is a dual number.
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and _tangent(x) is not None for x in tensors)


def _tangent(x: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]


def is_derived_again(d_out: Tensor) -> bool:
    """Whether a gradient is to be differentiated itself, or is one of several at once."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(d_out)
    )


def gradients_of(
    function: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor], needs: Sequence[bool], d_out: Tensor
) -> list[Tensor | None]:
    """Gradients of a function of plain operations; differentiable themselves, if gradients are being recorded.

    Args:
        function: Takes all tensors.
        needs: For which of them a gradient is wanted; None is given for the others.
    """
    again = torch.is_grad_enabled()
    if not again:
        tensors = [tensor.detach().requires_grad_(is_needed) for tensor, is_needed in zip(tensors, needs, strict=True)]
    with torch.enable_grad():
        out = function(tensors)
    wanted = [tensor for tensor, is_needed in zip(tensors, needs, strict=True) if is_needed]
    found = iter(torch.autograd.grad(out, wanted, d_out, create_graph=again))
    return [next(found) if is_needed else None for is_needed in needs]
