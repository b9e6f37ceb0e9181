"""What one call of the product consists of: a kernel with finitely many features, and the sequences it is applied to.

    kappa(q, k) = 1/R sum_r exp(a_r) phi_r(q).phi_r(k) + s
    out_i = sum_j exp(b_j) kappa(q_i, k_j) v_j / sum_j exp(b_j) kappa(q_i, k_j)

a is the frequencies' log-weight (`frequency_bias`), b the keys' (`key_bias`), s the smoothing. An estimate of a kernel
by cosines can be negative, and so can the sum that is divided by. Where the mean of a query's kernel,
m_i = sum_j exp(b_j) kappa(q_i, k_j) / sum_j exp(b_j), is below s/2, this query gets s/2 - m_i more of smoothing: no
mean is below s/2, weights still sum to one, and results are bounded. A kernel that is not negative has means of s and
more, and is left as it is. Without smoothing nothing is held.

Both classes only hold tensors: they are checked once, by whoever takes them from a user (`checked_kernel`,
`ops/shapes.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.envelopes import gaussian_envelope
from klformer.ops.feature_maps import FEATURE_MAPS, FeatureMap
from klformer.ops.transforms import is_transformed

#: The mean of a query's kernel is at least this share of the smoothing.
FLOOR = 0.5


@dataclass(frozen=True)
class SpectralKernel:
    """A kernel with finitely many features, the same for all sequences; per head, or one for all heads.

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianSpectrum, Kernel
        >>> kernel = Kernel("prf", GaussianSpectrum(num_heads=2, head_dim=8, num_frequencies=64)).present()
        >>> kernel.feature_map.name, kernel.omega.shape  # one for both heads
        ('prf', torch.Size([1, 64, 8]))
    """

    feature_map: FeatureMap
    #: Frequencies (H or 1, R, D); None for a map without.
    omega: Tensor | None = None
    #: (H or 1, D): the frequencies are omega + offset and omega - offset, 2 R of them at the cost of R.
    pair_offset: Tensor | None = None
    #: Log-weights of the frequencies, (H or 1, R); of both halves of a pair.
    frequency_bias: Tensor | None = None
    #: Constant added to the kernel, (H or 1,), where the map takes one.
    smoothing: Tensor | None = None
    #: The features of every key sum to one, for an exponential map: the envelope `simplex` of `ops/envelopes.py`.
    simplex: bool = False


@dataclass(frozen=True)
class SpectralOperands:
    """A kernel and the sequences: q (B, H, L, D), k (B, H, S, D), v (B, H, S, E).

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianSpectrum, Kernel
        >>> from klformer.ops.spectral_product import SpectralOperands
        >>> kernel = Kernel("prf", GaussianSpectrum(num_heads=2, head_dim=8)).present()
        >>> operands = SpectralOperands(kernel, *torch.randn(3, 1, 2, 5, 8), norm_coefficient=0.5)
        >>> operands.weighted().key_bias.shape  # the envelope, written out
        torch.Size([1, 2, 5])
        >>> named = operands.tensors()
        >>> list(named)
        ['q', 'k', 'v', 'omega']
        >>> again = SpectralOperands.from_tensors(list(named), list(named.values()), operands.map_code, causal=False)
        >>> again.norm_coefficient
        0.5
    """

    kernel: SpectralKernel
    q: Tensor
    k: Tensor
    v: Tensor
    #: (B or 1, H or 1, S), True = keep. A key that is not kept is not there, whatever it holds.
    key_mask: Tensor | None = None
    #: Log-weights of the keys, (B or 1, H or 1, S); finite where the key is kept.
    key_bias: Tensor | None = None
    #: Query i sees keys 0 .. i only.
    causal: bool = False
    #: c of the envelope exp(-c |k|^2), which is a weight of the keys besides `key_bias`; `weighted` writes it out.
    norm_coefficient: float = 0.0

    @property
    def feature_map(self) -> FeatureMap:
        return self.kernel.feature_map

    @cached_property
    def dtype(self) -> torch.dtype:
        """The working precision: at least float32, whatever the operands are stored in."""
        operands = torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), self.v.dtype)
        return torch.promote_types(operands, torch.float32)

    @property
    def num_projections(self) -> int:
        """Scores of a token: the frequencies R, or D for a map without."""
        return self.q.shape[-1] if self.kernel.omega is None else self.kernel.omega.shape[-2]

    @property
    def num_features(self) -> int:
        return self.feature_map.parts * self.num_projections

    @property
    def value_columns(self) -> int:
        """Rows W of a state: the values and a one, twice where a pair offset splits them in two."""
        return (self.v.shape[-1] + 1) * (1 if self.kernel.pair_offset is None else 2)

    @property
    def num_shifts(self) -> int:
        """Numbers that a state refers to: the largest score of each feature, or the largest log-weight of a key."""
        if self.feature_map.exponential:
            return self.num_projections
        return 0 if self.key_bias is None else 1

    @property
    def map_code(self) -> str:
        """The feature map and the envelope of the keys, as text for an op; `from_tensors` reads it."""
        words = [self.feature_map.name]
        if self.kernel.simplex:
            words.append("simplex")
        if self.norm_coefficient:
            words.append(repr(self.norm_coefficient))
        return " ".join(words)

    @property
    def wants_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors().values())

    def weighted(self) -> "SpectralOperands":
        """The same product, with the envelope of the norms in `key_bias`, (B, H, S)."""
        if not self.norm_coefficient:
            return self
        envelope = gaussian_envelope(self.k, self.norm_coefficient, self.key_mask)
        bias = envelope if self.key_bias is None else envelope + self.key_bias
        return replace(self, key_bias=bias, norm_coefficient=0.0)

    def tensors(self) -> dict[str, Tensor]:
        """The operands that are there, by name."""
        kernel = self.kernel
        named = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "omega": kernel.omega,
            "pair_offset": kernel.pair_offset,
            "frequency_bias": kernel.frequency_bias,
            "smoothing": kernel.smoothing,
            "key_bias": self.key_bias,
            "key_mask": self.key_mask,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @staticmethod
    def from_tensors(
        names: Sequence[str], tensors: Sequence[Tensor], map_code: str, *, causal: bool
    ) -> "SpectralOperands":
        """What `tensors()` and `map_code` were made of.

        Args:
            names: The names that `tensors()` gave.
            tensors: Its tensors, in the same order.
            map_code: The feature map and the envelope of the keys, as `map_code` has them.
            causal: Query i sees keys 0 .. i only.
        """
        named = dict(zip(names, tensors, strict=True))
        feature_map, *envelope = map_code.split()
        norms = [float(word) for word in envelope if word != "simplex"]
        kernel = SpectralKernel(
            FEATURE_MAPS[feature_map],
            omega=named.get("omega"),
            pair_offset=named.get("pair_offset"),
            frequency_bias=named.get("frequency_bias"),
            smoothing=named.get("smoothing"),
            simplex="simplex" in envelope,
        )
        return SpectralOperands(
            kernel,
            named["q"],
            named["k"],
            named["v"],
            key_mask=named.get("key_mask"),
            key_bias=named.get("key_bias"),
            causal=causal,
            norm_coefficient=norms[0] if norms else 0.0,
        )


def kept_keys(key_mask: Tensor | None, key_bias: Tensor | None) -> Tensor | None:
    """Which keys are there: those that the mask keeps and whose log-weight is not -inf.

    Args:
        key_mask: (B, S), True = keep; None if all are kept.
        key_bias: Log-weights of the keys, (B or 1, H or 1, S); None if there are none.

    Returns:
        (B or 1, H or 1, S), True = keep; None if all are kept.

    Raises:
        RuntimeError: the shapes do not fit.

    Examples:
        >>> import math, torch
        >>> from klformer.ops.spectral_product import kept_keys
        >>> kept_keys(torch.tensor([[True, True, False]]), torch.tensor([[[0.0, -math.inf, 0.0]]]))
        tensor([[[ True, False, False]]])
    """
    kept = None if key_mask is None else key_mask[:, None]
    if key_bias is None:
        return kept
    weighted = key_bias != -math.inf  # what is not a number is kept, and seen in the result
    return weighted if kept is None else kept & weighted


def checked_kernel(
    feature_map: str,
    keys: Tensor,
    omega: Tensor | None,
    *,
    pair_offset: Tensor | None,
    frequency_bias: Tensor | None,
    smoothing: float | Tensor,
) -> SpectralKernel:
    """The kernel that a user describes, for keys (B, H, S, D).

    Raises:
        ArgumentError: something does not fit the map, the heads or the head size.
    """
    kernel = SpectralKernel(
        FEATURE_MAPS[feature_map],
        omega=omega,
        pair_offset=pair_offset,
        frequency_bias=frequency_bias,
        smoothing=_smoothing_tensor(smoothing, keys),
    )
    check_kernel(kernel, num_heads=keys.shape[1], head_dim=keys.shape[3])
    return kernel


def _smoothing_tensor(smoothing: float | Tensor, like: Tensor) -> Tensor | None:
    """(H or 1,); None if there is none."""
    if isinstance(smoothing, Tensor):
        # A GPU would have to be waited for, and a transform has no numbers to look at.
        hidden = smoothing.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed(smoothing)
        if not hidden and not bool(((smoothing > 0) & smoothing.isfinite()).all()):
            raise ArgumentError(f"smoothing must be above 0 and finite for every head, got {smoothing.tolist()}")
        return smoothing
    if not 0 <= smoothing < math.inf:
        raise ArgumentError(f"smoothing must be at least 0 and finite, got {smoothing}")
    precision = torch.promote_types(like.dtype, torch.float32)
    return torch.full((1,), smoothing, dtype=precision, device=like.device) if smoothing else None


def paired_frequencies(omega: Tensor, pair_offset: Tensor) -> Tensor:
    """(H, R, D) and (H, D) -> the 2 R frequencies omega + offset and omega - offset."""
    return torch.cat([omega + pair_offset.unsqueeze(-2), omega - pair_offset.unsqueeze(-2)], dim=-2)


def check_kernel(kernel: SpectralKernel, *, num_heads: int, head_dim: int) -> None:
    """Raises ArgumentError if a tensor of the kernel does not fit its map, the heads or the head size."""
    fmap, omega = kernel.feature_map, kernel.omega
    if (omega is not None) != fmap.needs_frequencies:
        verb = "needs" if fmap.needs_frequencies else "takes no"
        raise ArgumentError(f"feature_map {fmap.name!r} {verb} frequencies (omega)")
    if omega is not None:
        _check_shape("omega", omega, num_heads, ("R", head_dim))
        if omega.shape[1] == 0:
            raise ArgumentError(f"omega must have at least one frequency, got shape {tuple(omega.shape)}")
    if kernel.pair_offset is not None:
        if fmap.name != "rks":
            raise ArgumentError(f"pair_offset goes with feature_map 'rks' only, got {fmap.name!r}")
        _check_shape("pair_offset", kernel.pair_offset, num_heads, (head_dim,))
    if kernel.frequency_bias is not None:
        if omega is None:
            raise ArgumentError(f"frequency_bias is for frequencies, which feature_map {fmap.name!r} does not have")
        _check_shape("frequency_bias", kernel.frequency_bias, num_heads, (omega.shape[1],))
    if kernel.smoothing is not None:
        if not fmap.takes_smoothing:
            raise ArgumentError(f"smoothing must be 0 for feature_map {fmap.name!r}")
        _check_shape("smoothing", kernel.smoothing, num_heads, ())


def _check_shape(name: str, tensor: Tensor, num_heads: int, sizes: tuple[int | str, ...]) -> None:
    """Raises ArgumentError unless the shape is (num_heads or 1, *sizes); a size that is a letter may be any."""
    fits = tensor.dim() == 1 + len(sizes) and tensor.shape[0] in (1, num_heads)
    fits = fits and all(
        isinstance(size, str) or found == size for size, found in zip(sizes, tensor.shape[1:], strict=True)
    )
    if not fits or not tensor.is_floating_point():
        wanted = ", ".join(map(str, (f"{num_heads} or 1", *sizes)))
        raise ArgumentError(
            f"{name} must be floating-point of shape ({wanted}), got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
