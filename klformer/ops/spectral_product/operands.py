"""What a call of the product consists of: a kernel with finitely many features, sequences, and the sums of a state.

    kappa(q, k) = 1/R sum_r exp(a_r) phi_r(q).phi_r(k) + s
    out_i = sum_j w_j kappa(q_i, k_j) v_j / sum_j w_j kappa(q_i, k_j)          w_j = exp(b_j) times the envelope of k_j

a is the frequencies' log-weight (`frequency_bias`), b the keys' (`key_bias`), s the smoothing. An estimate of a kernel
by cosines can be negative, and so can the sum that is divided by. Where the mean of a query's kernel,
m_i = sum_j w_j kappa(q_i, k_j) / sum_j w_j, is below s/2, this query gets s/2 - m_i more of smoothing: no mean is below
s/2, weights still sum to one, and results are bounded. A kernel that is not negative has means of s and more, and is
left as it is. Without smoothing nothing is held.

The classes only hold tensors. They are checked once, by whoever takes them from a user (`checked_kernel`,
`ops/shapes.py`).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.feature_maps import FEATURE_MAPS, FeatureMap
from klformer.ops.transforms import is_transformed

#: The mean of a query's kernel is at least this share of the smoothing.
FLOOR = 0.5
#: The log-scale of a state before any key: finite, so that a difference of two is a number, and far below any score.
NO_KEY = -1e30
#: What is computed: all keys, some keys into a state, queries against a state, or queries against the keys before them.
Step = Literal["product", "absorb", "read", "causal"]
#: The tensors of a kernel.
OF_KERNEL = ("omega", "pair_offset", "frequency_bias", "smoothing")


@dataclass(frozen=True, eq=False)
class SpectralKernel:
    """A kernel with finitely many features, the same for all sequences; per head, or one for all heads.

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianSpectrum, Kernel
        >>> kernel = Kernel("prf", GaussianSpectrum(num_heads=2, head_dim=8, num_frequencies=64)).present()
        >>> kernel.feature_map.name, kernel.omega.shape  # one for both heads
        ('prf', torch.Size([1, 64, 8]))
        >>> list(kernel.tensors())
        ['omega']
        >>> kernel.num_projections(head_dim=8), kernel.state_features(head_dim=8)
        (64, 64)

        A copy is the same kernel; a tensor that was changed in place shows in its version:

        >>> copy = kernel.with_tensors({"omega": kernel.omega.clone()})
        >>> kernel.same_as(copy), kernel.same_as(kernel.copy()), kernel.versions()
        (True, True, (0,))
        >>> kernel.omega.mul_(2).shape, kernel.versions(), kernel.same_as(copy)
        (torch.Size([1, 64, 8]), (1,), False)
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
    #: The envelope `simplex` of `ops/envelopes.py`, for an exponential map: the features of a key sum to R.
    simplex: bool = False
    #: c of the envelope exp(-c |k|^2), for an exponential map; 0 for none.
    norm_coefficient: float = 0.0

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the kernel has, by name."""
        return {name: x for name in OF_KERNEL if (x := getattr(self, name)) is not None}

    def num_projections(self, head_dim: int) -> int:
        """Return the scores of a token: the frequencies R, or D for a map without.

        Args:
            head_dim: Size D of queries and keys.
        """
        return head_dim if self.omega is None else self.omega.shape[-2]

    def state_features(self, head_dim: int) -> int:
        """Return the number F of features that a state has sums of.

        Args:
            head_dim: Size D of queries and keys.
        """
        pairs = 1 if self.pair_offset is None else 2
        return pairs * self.feature_map.parts * self.num_projections(head_dim) + (self.smoothing is not None)

    @property
    def log_normaliser(self) -> float:
        """The logarithm of what sums over features are divided by: R, or 1 for a map without frequencies."""
        return 0.0 if self.omega is None else math.log(self.omega.shape[-2])

    def versions(self) -> tuple[int, ...]:
        """Return numbers that change when a tensor is changed in place; none for tensors that do not count."""
        if torch.compiler.is_compiling():
            return ()
        return tuple(x._version for x in self.tensors().values() if not x.is_inference())

    def copy(self) -> "SpectralKernel":
        """Return the kernel with tensors of its own, in the same graph of autograd."""
        return self.with_tensors({name: x.clone() for name, x in self.tensors().items()})

    def with_tensors(self, tensors: dict[str, Tensor]) -> "SpectralKernel":
        """Return the kernel with other tensors, by the names of its own.

        Args:
            tensors: In the shapes of its own.
        """
        return replace(self, **tensors)  # type: ignore[arg-type]

    def same_as(self, other: "SpectralKernel") -> bool:
        """Return whether both have the same features: the same map, envelope and numbers.

        Args:
            other: Another kernel.
        """
        if self is other:
            return True
        mine, its = self.tensors(), other.tensors()
        return (
            self.feature_map.name == other.feature_map.name  # of a copied module it is a copy
            and (self.simplex, self.norm_coefficient) == (other.simplex, other.norm_coefficient)
            and mine.keys() == its.keys()
            and all(
                x is its[name] or (x.device == its[name].device and torch.equal(x, its[name]))
                for name, x in mine.items()
            )
        )


class Sums(NamedTuple):
    """The tensors of a state: what keys and values add up to, feature by feature.

    values_f = sum_j exp(b_j - log_scale_f) phi_f(k_j) v_j, and weights_f the same without v_j. F features: those of the
    map; with a pair offset first those times cos(offset.k), then those times sin(offset.k); last, with smoothing, the
    constant 1. Exponential maps have a scale for each feature, the others one for all.

    Examples:
        >>> import torch, klformer
        >>> k, v = torch.randn(2, 1, 2, 50, 8)
        >>> state = klformer.KernelState.of(k, v, torch.randn(2, 16, 8), feature_map="rks", smoothing=0.1)
        >>> [tuple(x.shape) for x in state.sums]
        [(1, 2, 33, 8), (1, 2, 33), (1, 2, 1)]
    """

    values: Tensor  # (B, H, F, E)
    weights: Tensor  # (B, H, F)
    log_scale: Tensor  # (B, H, F) or (B, H, 1)


#: The tensors of a call in the order in which ops take them.
TENSORS = ("q", "k", "v", *Sums._fields, *OF_KERNEL, "key_bias", "key_mask")


@dataclass(frozen=True, eq=False)
class Call:
    """One call: a kernel, and the queries, keys, values and sums that the step needs.

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianSpectrum, Kernel
        >>> from klformer.ops.spectral_product import Call
        >>> kernel = Kernel("prf", GaussianSpectrum(num_heads=2, head_dim=8)).present()
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> call = Call("product", kernel, q=q, k=k, v=v)
        >>> call.dtype, call.batch_size, call.num_heads, call.head_dim, call.value_dim
        (torch.float32, 1, 2, 8, 8)
        >>> [name for name, tensor in call.tensors().items() if tensor is not None]
        ['q', 'k', 'v', 'omega']
        >>> again = Call.of("product", tuple(call.tensors().values()), *call.constants)
        >>> again.kernel.same_as(kernel)
        True
    """

    step: Step
    kernel: SpectralKernel
    q: Tensor | None = None  # (B, H, L, D)
    k: Tensor | None = None  # (B, H, S, D)
    v: Tensor | None = None  # (B, H, S, E)
    #: What is read, or what a causal product goes on from.
    sums: Sums | None = None
    #: (B or 1, H or 1, S), True = keep. A key that is not kept is not there, whatever it holds.
    key_mask: Tensor | None = None
    #: Log-weights of the keys besides the envelope, (B or 1, H or 1, S); finite where the key is kept.
    key_bias: Tensor | None = None
    #: Whether the sums are as the same backend's `absorb` gave them just now, which nobody has merged or weighed.
    just_absorbed: bool = False

    @property
    def feature_map(self) -> FeatureMap:
        return self.kernel.feature_map

    @property
    def tokens(self) -> Tensor:
        """Keys, or queries where there are none."""
        tokens = self.q if self.k is None else self.k
        assert tokens is not None, "every step has keys or queries"
        return tokens

    @property
    def dtype(self) -> torch.dtype:
        """The working precision: at least float32, whatever the operands are stored in."""
        found = torch.float32
        for x in (self.q, self.k, self.v, None if self.sums is None else self.sums.values):
            found = found if x is None else torch.promote_types(found, x.dtype)
        return found

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_heads(self) -> int:
        return self.tokens.shape[1]

    @property
    def head_dim(self) -> int:
        return self.tokens.shape[3]

    @property
    def value_dim(self) -> int:
        values = self.v if self.sums is None else self.sums.values
        assert values is not None, "every step has values or a state"
        return values.shape[3]

    @property
    def num_projections(self) -> int:
        return self.kernel.num_projections(self.head_dim)

    @property
    def num_features(self) -> int:
        """Features of a token that are made chunk by chunk: without those of a pair offset and of the smoothing."""
        return self.feature_map.parts * self.num_projections

    @property
    def num_scales(self) -> int:
        """Log-scales of a state: one for each feature of an exponential map, else one."""
        return self.num_projections if self.feature_map.exponential else 1

    def tensors(self) -> dict[str, Tensor | None]:
        """Return all tensors by name, in the order of `TENSORS`; None for what the call does not have."""
        sums = (None, None, None) if self.sums is None else self.sums
        of_kernel = (getattr(self.kernel, name) for name in OF_KERNEL)
        found = (self.q, self.k, self.v, *sums, *of_kernel, self.key_bias, self.key_mask)
        return dict(zip(TENSORS, found, strict=True))

    @property
    def constants(self) -> tuple[str, bool, float]:
        """What a call consists of besides its step and its tensors, as arguments of `of`."""
        return self.feature_map.name, self.kernel.simplex, self.kernel.norm_coefficient

    @staticmethod
    def of(
        step: Step, tensors: tuple[Tensor | None, ...], feature_map: str, simplex: bool, norm_coefficient: float
    ) -> "Call":
        """Return the call that `tensors()` and `constants` were taken from.

        Args:
            step: Its step.
            tensors: The values of `tensors()`.
            feature_map: Name of the map.
            simplex: As in `SpectralKernel`.
            norm_coefficient: As in `SpectralKernel`.
        """
        named = dict(zip(TENSORS, tensors, strict=True))
        values, weights, log_scale = (named[name] for name in Sums._fields)
        sums = None
        if values is not None and weights is not None and log_scale is not None:
            sums = Sums(values, weights, log_scale)
        of_kernel = {name: named[name] for name in OF_KERNEL}
        kernel = SpectralKernel(
            FEATURE_MAPS[feature_map], **of_kernel, simplex=simplex, norm_coefficient=norm_coefficient
        )
        q, k, v, key_bias, key_mask = (named[name] for name in ("q", "k", "v", "key_bias", "key_mask"))
        return Call(step, kernel, q=q, k=k, v=v, sums=sums, key_mask=key_mask, key_bias=key_bias)

    @property
    def wants_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.tensors().values())


def kept_keys(key_mask: Tensor | None, key_bias: Tensor | None) -> Tensor | None:
    """Return which keys are there: those that the mask keeps and whose log-weight is not -inf.

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
    """Return the kernel that a user describes, for keys (B, H, S, D).

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
    """Return (H or 1,); None if there is none."""
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
    """Raise ArgumentError if a tensor of the kernel does not fit its map, the heads or the head size."""
    fmap, omega = kernel.feature_map, kernel.omega
    if (omega is not None) != fmap.needs_frequencies:
        verb = "needs" if fmap.needs_frequencies else "takes no"
        raise ArgumentError(f"feature_map {fmap.name!r} {verb} frequencies (omega)")
    if omega is not None:
        check_shape("omega", omega, num_heads, ("R", head_dim))
        if omega.shape[1] == 0:
            raise ArgumentError(f"omega must have at least one frequency, got shape {tuple(omega.shape)}")
    if kernel.pair_offset is not None:
        if fmap.name != "rks":
            raise ArgumentError(f"pair_offset goes with feature_map 'rks' only, got {fmap.name!r}")
        check_shape("pair_offset", kernel.pair_offset, num_heads, (head_dim,))
    if kernel.frequency_bias is not None:
        if omega is None:
            raise ArgumentError(f"frequency_bias is for frequencies, which feature_map {fmap.name!r} does not have")
        check_shape("frequency_bias", kernel.frequency_bias, num_heads, (omega.shape[1],))
    if kernel.smoothing is not None:
        if not fmap.takes_smoothing:
            raise ArgumentError(f"smoothing must be 0 for feature_map {fmap.name!r}")
        check_shape("smoothing", kernel.smoothing, num_heads, ())
    if (kernel.simplex or kernel.norm_coefficient) and not fmap.exponential:
        raise ArgumentError(f"an envelope goes with an exponential feature_map only, got {fmap.name!r}")


def check_shape(name: str, tensor: Tensor, num_heads: int, sizes: tuple[int | str, ...]) -> None:
    """Raise ArgumentError unless the shape is (num_heads or 1, *sizes); a size that is a letter may be any."""
    is_tensor = isinstance(tensor, Tensor)
    fits = is_tensor and tensor.dim() == 1 + len(sizes) and tensor.shape[0] in (1, num_heads)
    fits = fits and all(
        isinstance(size, str) or found == size for size, found in zip(sizes, tensor.shape[1:], strict=True)
    )
    if not fits or not tensor.is_floating_point():
        wanted = ", ".join(map(str, (f"{num_heads} or 1", *sizes)))
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if is_tensor else type(tensor).__name__
        raise ArgumentError(f"{name} must be floating-point of shape ({wanted}), got {got}")
