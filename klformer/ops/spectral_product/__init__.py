"""The product that all kernel attentions are, in two steps: keys and values into a state, queries against the state.

    out_i = sum_j w_j kappa(q_i, k_j) v_j / sum_j w_j kappa(q_i, k_j)      (Eq. 1 of the paper; w_j = exp(key_bias_j))
    kappa(q, k) = 1/R sum_r exp(frequency_bias_r) phi_r(q).phi_r(k) + smoothing

A reader's guide. `MultiHeadAttention.forward` projects and calls an attention; a kernel attention calls
`kernels/kernel.py`, which makes a `SpectralKernel` of its present frequencies and calls `attend` below. From there:

    operands.py                what a call consists of: the kernel, q, k, v, and the sums of a state
    dispatch.py                which backend computes it, and why not another
    self_check.py              whether a backend is right on a device, before it is used there
    autograd.py                one node of autograd's graph (or one op, when compiled) around forward and backward
    chunked/__init__.py        the backend for everything: to one of the four files below
    chunked/pairs.py           few queries or short sequences: every pair, and no state
    chunked/features.py        absorb and read for cosines (rks) and elu, forward and backward
    chunked/exponential.py     absorb and read for positive features (prf), forward and backward
    chunked/causal.py          every query against the keys up to it; the arithmetic is in chunked/causal_block.py

To change the forward of RKS read operands.py, autograd.py and in chunked/ features.py, floor.py, carried.py, tiles.py;
for few tokens pairs.py; if it is causal, causal.py and causal_block.py, too. Those in chunked/ lean on gradients.py
(where gradients go), memory.py (memory that is used again) and pair_offset.py. Beside them: reference.py is the
definition, quadratic; plain.py is linear, for derivatives that fused operations do not have; flash.py goes through
torch's fused attention (fused_softmax.py). state.py makes values of sums, which are merged and kept in files;
decoding.py absorbs and reads one token at a time; parts.py brings the sums of several processes together.
"""

from typing import Literal, overload

from torch import Tensor

from klformer.ops.shapes import check_key_bias, check_operands
from klformer.ops.spectral_product.autograd import FusedBackend
from klformer.ops.spectral_product.chunked import ChunkedBackend
from klformer.ops.spectral_product.dispatch import (
    BACKENDS,
    Backend,
    choose_backend,
    explain_backends,
    record_backends,
    register_backend,
    use_backend,
)
from klformer.ops.spectral_product.flash import FlashBackend
from klformer.ops.spectral_product.operands import Call, SpectralKernel, Sums, checked_kernel, kept_keys
from klformer.ops.spectral_product.plain import PlainBackend
from klformer.ops.spectral_product.reference import ReferenceBackend
from klformer.ops.spectral_product.state import KernelState, absorb, causal, read
from klformer.ops.triton.backend import TritonBackend

register_backend("flash", FlashBackend(priority=10, on_cpu=False))
register_backend("triton", TritonBackend())
register_backend("chunked", ChunkedBackend())
# Below `chunked`, which serves every call: only who asks for them gets them.
register_backend("flash_cpu", FlashBackend(priority=-5))
register_backend("flash_half", FlashBackend(priority=-5, half=True))
register_backend("plain", PlainBackend())
register_backend("reference", ReferenceBackend())

__all__ = [
    "BACKENDS",
    "Backend",
    "Call",
    "FusedBackend",
    "KernelState",
    "SpectralKernel",
    "Sums",
    "absorb",
    "attend",
    "causal",
    "explain_backends",
    "kept_keys",
    "read",
    "record_backends",
    "register_backend",
    "spectral_product",
    "use_backend",
]


@overload
def spectral_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    *,
    feature_map: str,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    frequency_bias: Tensor | None = None,
    pair_offset: Tensor | None = None,
    smoothing: float | Tensor = 0.0,
    causal: bool = False,
    return_log_sum: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def spectral_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    *,
    feature_map: str,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    frequency_bias: Tensor | None = None,
    pair_offset: Tensor | None = None,
    smoothing: float | Tensor = 0.0,
    causal: bool = False,
    return_log_sum: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def spectral_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    *,
    feature_map: str,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    frequency_bias: Tensor | None = None,
    pair_offset: Tensor | None = None,
    smoothing: float | Tensor = 0.0,
    causal: bool = False,
    return_log_sum: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with the kernel of `feature_map` at the frequencies `omega`, in time and memory linear in the length.

    Args:
        q: Queries (B, H, L, D).
        k: Keys (B, H, S, D).
        v: Values (B, H, S, E).
        omega: Frequencies (H or 1, R, D); None for "elu", which has none.
        feature_map: "rks", "prf" or "elu".
        key_mask: (B, S), True = keep. A key that is not kept contributes to nothing; a query without any key gives 0.
        key_bias: Log-weights of the keys, (B or 1, H or 1, S). -inf is the same as a key that is not kept.
        frequency_bias: Log-weights of the frequencies, (H or 1, R); not for "elu".
        pair_offset: (H or 1, D), "rks" only. The frequencies are then omega + offset and omega - offset, 2 R of them,
            at the cost of R.
        smoothing: Added to the kernel, whose value at distance 0 is 1 without a frequency_bias; "rks" only. A number,
            or one for each head, (H or 1,). A query whose kernel has a mean below half of it gets as much more as it
            needs for that, so that no denominator is negative; without smoothing nothing is held.
        causal: Query i sees keys 0 .. i only; needs L = S.
        return_log_sum: Return the log-sums, too.
        backend: "auto", or the name of one: "chunked" (serves everything), "flash_cpu" and "flash" (prf that is not
            causal, through torch's fused attention; "auto" takes it on CUDA up to float32), "flash_half" (the same, in
            half precision where q, k and v are), "plain" (autograd's own derivatives), "reference" (quadratic), or one
            that was registered.

    Returns:
        (B, H, L, E), in the type of `q`. Computed in float32 at least, also under autocast. With `return_log_sum` also
        log sum_j w_j kappa(q_i, k_j), (B, H, L), -inf without any key: results over disjoint sets of keys are merged by
        it. That of an RKS kernel is of the denominator that was divided by, raised by the smoothing if it had to be;
        NaN where it is negative, which without smoothing it can be. Differentiable in all tensors.

    Raises:
        ArgumentError: a shape or a combination of arguments is impossible.

    Examples:
        >>> import torch, klformer
        >>> q, k, v = (torch.randn(2, 4, 1000, 16) for _ in range(3))
        >>> klformer.spectral_product(q, k, v, torch.randn(4, 64, 16), feature_map="prf").shape
        torch.Size([2, 4, 1000, 16])
    """
    check_operands(q, k, v, key_mask=key_mask, causal=causal)
    check_key_bias(key_bias, k)
    kernel = checked_kernel(
        feature_map, k, omega, pair_offset=pair_offset, frequency_bias=frequency_bias, smoothing=smoothing
    )
    mask = kept_keys(key_mask, key_bias)
    out, log_sum = attend(kernel, q, k, v, key_mask=mask, key_bias=key_bias, causal=causal, backend=backend)
    return (out, log_sum) if return_log_sum else out


def attend(
    kernel: SpectralKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    causal: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend with a kernel; operands are known to fit.

    Args:
        kernel: With its present frequencies.
        q: Queries (B, H, L, D).
        k: Keys (B, H, S, D).
        v: Values (B, H, S, E).
        key_mask: (B or 1, H or 1, S), True = keep.
        key_bias: (B or 1, H or 1, S), finite where the key is kept.
        causal: Query i sees keys 0 .. i only.
        backend: As in `spectral_product`.

    Returns:
        The result (B, H, L, E) and its log-sums (B, H, L).

    Raises:
        ArgumentError: there is no such backend, or it can't serve the call.

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianSpectrum, Kernel
        >>> from klformer.ops.spectral_product import attend
        >>> kernel = Kernel("prf", GaussianSpectrum(num_heads=2, head_dim=8)).present()
        >>> out, log_sum = attend(kernel, *torch.randn(3, 1, 2, 5, 8))
        >>> out.shape, log_sum.shape
        (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 5]))
    """
    call = Call("causal" if causal else "product", kernel, q=q, k=k, v=v, key_mask=key_mask, key_bias=key_bias)
    chosen = choose_backend(call, backend)
    return chosen.causal(call)[:2] if causal else chosen.product(call)
