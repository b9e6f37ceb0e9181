"""Derivatives that fused operations do not have, noticed before a wrong one is given.

Fused operations have a backward of their own and nothing else. Whoever has one asks here whether plain operations are
to take its place: torch derives everything from those.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether forward-mode derivatives of these tensors are taken, or a transform of torch.func is at work."""
    if torch._C._are_functorch_transforms_active():
        return True
    # Outside of a level of forward-mode derivatives nothing is a dual number; inside, what is traced may be one.
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return forward_ad._current_level >= 0
    return any(x is not None and _tangent(x) is not None for x in tensors)


def _tangent(x: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]


def is_derived_again(d_out: Tensor) -> bool:
    """Return whether a gradient is to be differentiated itself, or is one of several at once."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(d_out)
    )


def recomputed(function: Callable[..., Tensor], *operands: object, preserve_rng_state: bool = True) -> Tensor:
    """Return what a function gives, computed again for backward; torch.func's transforms keep what they need."""
    if torch._C._are_functorch_transforms_active():
        return function(*operands)
    out: Tensor = checkpoint(function, *operands, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    return out


def gradients_of(
    function: Callable[[Sequence[Tensor | None]], Sequence[Tensor]],
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    d_results: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return gradients of a function of plain operations; differentiable, if gradients are being recorded.

    Args:
        function: Takes all tensors, and returns its results.
        needs: For which of them a gradient is wanted; None is given for the others.
        d_results: Gradients of the results; None for zero.
    """
    again = torch.is_grad_enabled()
    if not again:
        tensors = [
            None if x is None else x.detach().requires_grad_(is_needed)
            for x, is_needed in zip(tensors, needs, strict=True)
        ]
    with torch.enable_grad():
        results = function(tensors)
    given = [(x, d) for x, d in zip(results, d_results, strict=True) if d is not None and x.requires_grad]
    wanted = [x for x, is_needed in zip(tensors, needs, strict=True) if is_needed and x is not None]
    outputs, d_outputs = zip(*given, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, d_outputs, create_graph=again, allow_unused=True))
    return [next(found) if is_needed else None for is_needed in needs]
