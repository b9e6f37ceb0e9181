"""The product that all kernel attentions are: phi(q) (phi(k)^T v), normalised, for any feature map and frequencies.

    out_i = sum_j w_j kappa(q_i, k_j) v_j / sum_j w_j kappa(q_i, k_j)      (Eq. 1 of the paper; w_j = exp(key_bias_j))
    kappa(q, k) = 1/R sum_r exp(frequency_bias_r) phi_r(q).phi_r(k) + smoothing

`spectral_product` is the door: it checks what a user gives and hands it to a backend. `chunked` computes it in time and
memory linear in the length, and so does `softmax_pair` for positive features, through torch's fused attention;
`reference` is the definition, quadratic, in plain PyTorch. `decoding` takes it apart into a state that absorbs keys and
answers queries; `state` makes values of such states, which are merged and kept in files.
"""

from torch import Tensor

from klformer.checks import check_choice
from klformer.errors import ArgumentError
from klformer.ops.shapes import check_key_bias, check_operands
from klformer.ops.spectral_product.backends import BACKENDS, Backend, FusedBackend, choose_backend
from klformer.ops.spectral_product.chunked import ChunkedBackend, Recompute
from klformer.ops.spectral_product.inference import InferenceBackend
from klformer.ops.spectral_product.operands import (
    SpectralKernel,
    SpectralOperands,
    checked_kernel,
    kept_keys,
)
from klformer.ops.spectral_product.reference import ReferenceBackend
from klformer.ops.spectral_product.softmax_pair import SoftmaxPairBackend

#: Backends that make features again in backward always, and never, by name.
RECOMPUTE: dict[str, Recompute] = {"chunked_always": "always", "chunked_never": "never"}

# In the order in which `auto` asks.
BACKENDS.add("inference", InferenceBackend("inference"))
BACKENDS.add("softmax_pair", SoftmaxPairBackend("softmax_pair"))
BACKENDS.add("chunked", ChunkedBackend("chunked"))
BACKENDS.add("reference", ReferenceBackend())
# Never chosen by `auto`: in half precision, and what `recompute` asks for.
BACKENDS.add("softmax_pair_half", SoftmaxPairBackend("softmax_pair_half", half=True))
for _name, _recompute in RECOMPUTE.items():
    BACKENDS.add(_name, ChunkedBackend(_name, recompute=_recompute))

__all__ = [
    "BACKENDS",
    "Backend",
    "FusedBackend",
    "SpectralKernel",
    "SpectralOperands",
    "attend",
    "kept_keys",
    "spectral_product",
]


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
    backend: str = "auto",
    recompute: Recompute = "auto",
) -> Tensor:
    """Attention with the kernel of `feature_map` at the frequencies `omega`, in time and memory linear in the length.

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
        backend: "auto", or the name of one: "chunked", "softmax_pair" (prf that is not causal, through torch's fused
            attention; what "auto" takes on CUDA up to float32), "softmax_pair_half" (the same, in half precision where
            q, k and v are), "inference" (nothing is kept for gradients) or "reference" (quadratic).
        recompute: Whether backward makes the features of a bidirectional "rks" or "elu" product again ("always") or
            forward keeps them, 4 F (L + S) bytes a head ("never"). "auto" keeps those of "rks" on a GPU if they take no
            more than 32 MiB in all; on a CPU that gained nothing. Other products always make them again. An argument
            of this function only: attentions have "auto".

    Returns:
        (B, H, L, E), in the type of `v`. Computed in float32 at least, also under autocast. Differentiable in q, k, v,
        omega, key_bias, frequency_bias, pair_offset and smoothing.

    Raises:
        ArgumentError: if a shape or a combination of arguments is impossible.

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
    operands = SpectralOperands(kernel, q, k, v, key_mask=mask, key_bias=key_bias, causal=causal)
    return attend(operands, backend=backend, recompute=recompute)


def attend(operands: SpectralOperands, *, backend: str = "auto", recompute: Recompute = "auto") -> Tensor:
    """The product of operands that are known to fit; shapes as in `spectral_product`.

    Args:
        operands: The kernel, and q (B, H, L, D), k (B, H, S, D) and v (B, H, S, E).
        backend: As in `spectral_product`.
        recompute: As in `spectral_product`.

    Returns:
        (B, H, L, E), in the type of v.

    Raises:
        ArgumentError: there is no such backend, or it can't serve the call.

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianSpectrum, Kernel
        >>> from klformer.ops.spectral_product import SpectralOperands, attend
        >>> kernel = Kernel("prf", GaussianSpectrum(num_heads=2, head_dim=8)).present()
        >>> attend(SpectralOperands(kernel, *torch.randn(3, 1, 2, 5, 8))).shape
        torch.Size([1, 2, 5, 8])
    """
    check_choice("recompute", recompute, ("auto", *RECOMPUTE.values()))
    if recompute != "auto":
        if backend not in ("auto", "chunked"):
            raise ArgumentError(f"recompute={recompute!r} is for backend 'chunked', got {backend!r}")
        keeps = not (operands.causal or operands.feature_map.exponential)
        if recompute == "never" and not keeps:
            kind = "causal" if operands.causal else operands.feature_map.name
            raise ArgumentError(
                f"recompute='never' is not to be had: features of a {kind} product are always made again"
            )
        if operands.wants_gradients and keeps:
            backend = f"chunked_{recompute}"
    return choose_backend(backend, operands).attend(operands)
