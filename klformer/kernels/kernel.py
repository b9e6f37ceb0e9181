"""A kernel = a spectral distribution x a feature map x an envelope; LinearElu's is the one without a distribution."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from klformer.checks import check_choice, check_flag, check_number
from klformer.errors import ArgumentError
from klformer.kernels.spectrum import SpectralDistribution
from klformer.ops.envelopes import gaussian_envelope, matched_envelope, simplex_envelope
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product import BACKENDS, SpectralKernel, attend, kept_keys
from klformer.ops.spectral_product.operands import check_shape

Role = Literal["query", "key"]

#: A learned smoothing is no smaller: attention divides by half of it at worst.
LEAST_SMOOTHING = 1e-4


class Kernel(nn.Module):
    """kappa(q, k) = E phi(q).phi(k) + smoothing, estimated with the frequencies that the distribution holds.

    Inputs are multiplied by D^(-1/4) before the map, so that q.k has the temperature 1/sqrt D of softmax attention;
    "elu" takes them as they are.

    Args:
        feature_map: "rks", "prf" or "elu".
        spectrum: Where the frequencies come from; None for "elu".
        envelope: A factor of the key, for exponential maps ("prf") only (`ops/envelopes.py`). "gaussian" is the
            paper's exp(-c |x|^2). "matched" is exp(-|M x|^2 / 2) for a distribution that is a linear map M of Gaussian
            noise. "simplex" makes the features of every key sum to a constant, whatever the frequencies are.
        norm_coefficient: c of the Gaussian envelope: 1 in the paper, 1/2 for the softmax kernel.
        smoothing: Constant added to the kernel (its value at distance 0 is 1), "rks" only. Estimates of an RKS kernel
            can be negative, and so can their sum, by which attention divides; where their mean is below half of the
            smoothing, a query gets as much more as it needs (`ops/spectral_product/operands.py`).
        learn_smoothing: Learn the smoothing, a head its own, from that value on; it stays positive.
        learn_temperature: Learn a factor of queries and keys, a head its own, from 1 on. Trained projections can do
            that themselves; where they are fixed, it counts.
        redraw: Whether `klformer.resample` draws new noise; otherwise the first draw is kept for good.
        frozen: Learn nothing, also not what another option says is learned: the control of the same kernel. Only the
            noise changes.
        backend: Who computes its products: "auto", or a name as in `spectral_product`.

    Raises:
        ArgumentError: options that do not go together, such as a smoothing of "prf".

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianMixtureSpectrum, Kernel
        >>> spectrum = GaussianMixtureSpectrum(num_heads=2, head_dim=8, num_frequencies=32)
        >>> kernel = Kernel("rks", spectrum, smoothing=0.1)
        >>> q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 4)
        >>> weights = kernel.estimate(q, k)
        >>> weights.shape, kernel.attend(q, k, v).shape
        (torch.Size([1, 2, 5, 7]), torch.Size([1, 2, 5, 4]))

        Its features: a cosine and a sine for each frequency, and one for the smoothing.

        >>> features = kernel.features(q, "query")
        >>> features.shape, kernel.scaled_frequencies().shape
        (torch.Size([1, 2, 5, 65]), torch.Size([2, 32, 8]))
        >>> torch.allclose(features @ kernel.features(k, "key").transpose(-1, -2), weights)
        True

        What the product is given. The envelope of positive features goes with it, unless it takes more than a number:

        >>> positive = Kernel("prf", spectrum, norm_coefficient=0.5)
        >>> present = positive.present()
        >>> round(present.norm_coefficient * 8**0.5, 3), positive.log_weights(present, k, key_mask=None)
        (0.5, None)
        >>> positive.query_log_weights(present, q).shape
        torch.Size([1, 2, 5])
        >>> single = GaussianMixtureSpectrum(num_heads=2, head_dim=8, num_components=1, tied=False)
        >>> matched = Kernel("prf", single, envelope="matched")
        >>> matched.log_weights(matched.present(), k, key_mask=None).shape
        torch.Size([1, 2, 7])
    """

    def __init__(
        self,
        feature_map: str,
        spectrum: SpectralDistribution | None,
        *,
        envelope: Literal["gaussian", "matched", "simplex"] = "gaussian",
        norm_coefficient: float = 1.0,
        smoothing: float = 0.0,
        learn_smoothing: bool = False,
        learn_temperature: bool = False,
        redraw: bool = True,
        frozen: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_choice("feature_map", feature_map, FEATURE_MAPS)
        if backend != "auto":
            BACKENDS[backend]
        self.backend = backend
        self.feature_map = FEATURE_MAPS[feature_map]
        if (spectrum is not None) != self.feature_map.needs_frequencies:
            raise ArgumentError(f"feature_map {feature_map!r} does not go with spectrum {spectrum}")
        check_choice("envelope", envelope, ("gaussian", "matched", "simplex"))
        check_number("norm_coefficient", norm_coefficient)
        check_number("smoothing", smoothing)
        flags = {"learn_smoothing": learn_smoothing, "learn_temperature": learn_temperature}
        for name, flag in {**flags, "redraw": redraw, "frozen": frozen}.items():
            check_flag(name, flag)
        if envelope != "gaussian" and not self.feature_map.exponential:
            raise ArgumentError(f"envelope must be 'gaussian' for {feature_map!r}, which has none, got {envelope!r}")
        if norm_coefficient != 1 and not (self.feature_map.exponential and envelope == "gaussian"):
            what = f"envelope={envelope!r}" if self.feature_map.exponential else repr(feature_map)
            raise ArgumentError(f"norm_coefficient must be 1 for {what}, which has no c, got {norm_coefficient!r}")
        if smoothing and not self.feature_map.takes_smoothing:
            raise ArgumentError(f"smoothing must be 0 for {feature_map!r}, got {smoothing!r}")
        if learn_smoothing and smoothing < LEAST_SMOOTHING:
            raise ArgumentError(
                f"learn_smoothing needs a smoothing of at least {LEAST_SMOOTHING:g} to start from, got {smoothing!r}"
            )
        if learn_temperature and spectrum is None:
            raise ArgumentError(f"learn_temperature must be False for {feature_map!r}, which takes inputs as they are")
        if envelope == "matched" and (spectrum is None or spectrum.linear_map() is None):
            raise ArgumentError(
                "envelope='matched' needs frequencies that are one linear map of Gaussian noise (a Gaussian, or a "
                "mixture whose components share their scale); 'simplex' is for any"
            )
        if spectrum is not None:
            spectrum.check_map(self.feature_map)
        self.spectrum = spectrum
        self.envelope = envelope
        self.norm_coefficient = norm_coefficient
        self.smoothing = smoothing
        self.input_scale = 1.0 if spectrum is None else spectrum.head_dim**-0.25
        num_heads = 1 if spectrum is None else spectrum.num_heads
        #: Logarithms, (H,): what they stand for stays positive.
        self.log_smoothing = nn.Parameter(torch.full((num_heads,), math.log(smoothing))) if learn_smoothing else None
        self.log_temperature = nn.Parameter(torch.zeros(num_heads)) if learn_temperature else None
        if spectrum is not None and not redraw:
            spectrum.redraw = False
        self.frozen = frozen
        if frozen:
            self.requires_grad_(False)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Attention with this kernel. Nothing is checked: that is the caller's.

        Args:
            q: Queries (B, H, L, D).
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S), besides those of the envelope.
            causal: Query i sees keys 0 .. i only; needs L = S.

        Returns:
            (B, H, L, E).
        """
        present, mask = self.present(), kept_keys(key_mask, key_bias)
        bias = self.log_weights(present, k, mask, key_bias)
        return attend(present, q, k, v, key_mask=mask, key_bias=bias, causal=causal, backend=self.backend)[0]

    def present(self) -> SpectralKernel:
        """Return the kernel with its present frequencies, the scaling of the inputs folded into them."""
        if self.spectrum is None:
            return SpectralKernel(self.feature_map)
        with full_precision(self.spectrum.anchor()):
            # Only RKS has a cheaper form for pairs of frequencies.
            pairs = self.spectrum.paired_frequencies() if self.feature_map.name == "rks" else None
            omega, offset = (self.spectrum.frequencies(), None) if pairs is None else pairs
            weights, scale, who = self.spectrum.log_weights(), self._scale(), type(self.spectrum).__name__
            # Of many draws at once there is one in the place of each head.
            is_whole = isinstance(omega, torch.Tensor) and omega.dim() == 3
            num_heads, dim = omega.shape[0] if is_whole else self.spectrum.num_heads, self.spectrum.head_dim
            check_shape(f"{who}.frequencies()", omega, num_heads, ("R", dim))
            if pairs is None and weights is not None:
                check_shape(f"{who}.log_weights()", weights, num_heads, (omega.shape[1],))
            return SpectralKernel(
                self.feature_map,
                omega=omega * scale,
                pair_offset=None if offset is None else (offset.unsqueeze(-2) * scale).squeeze(-2),
                frequency_bias=None if pairs is not None else weights,
                smoothing=self._present_smoothing(omega),
                simplex=self.feature_map.exponential and self.envelope == "simplex",
                norm_coefficient=self._number_for_norms() or 0.0,
            )

    def log_weights(
        self, present: SpectralKernel, k: Tensor, key_mask: Tensor | None, key_bias: Tensor | None = None
    ) -> Tensor | None:
        """Return the log-weights of keys that the present kernel does not make itself, and those that are given.

        Args:
            present: What `present()` gives.
            k: Keys (B, H, S, D).
            key_mask: (B or 1, H or 1, S), True = keep.
            key_bias: (B or 1, H or 1, S).

        Returns:
            (B, H, S); `key_bias` if there is nothing to add.
        """
        inside = present.simplex or present.norm_coefficient
        envelope = None if inside else self._envelope(present, k, key_mask)
        if envelope is None:
            return key_bias
        return envelope if key_bias is None else envelope + key_bias

    def query_log_weights(self, present: SpectralKernel, q: Tensor) -> Tensor | None:
        """Return the envelope of queries as log-weights.

        It cancels in attention with this kernel alone, and counts where results are merged with those of another.

        Args:
            present: What `present()` gives.
            q: Queries (B, H, L, D).

        Returns:
            (B, H, L); None where a query has none ("simplex", "elu").
        """
        return None if self.envelope == "simplex" else self._envelope(present, q, None)

    def features(self, x: Tensor, role: Role) -> Tensor:
        """Explicit features: phi(q).phi(k) is what attention weighs a key with, smoothing included.

        But for a factor of the query that cancels there: an envelope belongs to keys. For analysis: differentiable, of
        the size of the whole sequence, and without the shifts that keep attention from overflowing.

        Args:
            x: Queries or keys, (B, H, L, D).
            role: "query" or "key".

        Returns:
            (B, H, L, F).
        """
        with full_precision(x) as dtype:
            x = x.to(dtype)
            if self.spectrum is None:
                return self.feature_map.explicit(x)
            omega = self.scaled_frequencies().to(dtype)
            scores = x @ omega.transpose(-1, -2)
            log_weight = scores.new_zeros(1)
            if (frequency_bias := self.spectrum.log_weights()) is not None:
                log_weight = frequency_bias.to(dtype).unsqueeze(-2) / 2
            if role == "key" and (envelope := self._envelope(self.present(), x, None)) is not None:
                log_weight = log_weight + envelope.unsqueeze(-1)
            features = self.feature_map.explicit(scores, log_weight) / omega.shape[-2] ** 0.5
            smoothing = self._present_smoothing(omega)
            if smoothing is None:
                return features
            constant = smoothing.to(dtype).sqrt()[:, None, None].expand(*features.shape[:-1], 1)
            return torch.cat([features, constant], dim=-1)

    def estimate(self, q: Tensor, k: Tensor) -> Tensor:
        """The kernel itself for all pairs of queries and keys. For analysis.

        Args:
            q: Queries (B, H, L, D).
            k: Keys (B, H, S, D).

        Returns:
            (B, H, L, S).
        """
        products = self.features(q, "query") @ self.features(k, "key").transpose(-1, -2)
        envelope = self._envelope(self.present(), q, None)
        return products if envelope is None else products * envelope.exp().unsqueeze(-1)

    def scaled_frequencies(self) -> Tensor:
        """Omega with the scaling of the inputs folded into it, (H or 1, R, D).

        Raises:
            ArgumentError: the kernel has no frequencies.
        """
        if self.spectrum is None:
            raise ArgumentError(f"feature_map {self.feature_map.name!r} has no frequencies")
        return self.spectrum.frequencies() * self._scale()

    def _scale(self) -> float | Tensor:
        """What inputs are multiplied by: a number, or (H, 1, 1)."""
        if self.log_temperature is None:
            return self.input_scale
        return self.input_scale * self.log_temperature.exp()[:, None, None]

    def _present_smoothing(self, like: Tensor) -> Tensor | None:
        """(H or 1,), on the device and in the precision of `like` where it is not learned."""
        if self.log_smoothing is not None:
            # The bound is left out of the gradient: that of a clamp is 0, and what is below would stay there.
            below = (math.log(LEAST_SMOOTHING) - self.log_smoothing.detach()).clamp(min=0)
            return (self.log_smoothing + below).exp()
        return like.new_full((1,), self.smoothing) if self.smoothing else None

    def _number_for_norms(self) -> float | None:
        """Return c of exp(-c |k|^2) if this is the envelope and c is a number; None otherwise."""
        scale = self._scale()
        if self.feature_map.exponential and self.envelope == "gaussian" and not isinstance(scale, Tensor):
            return self.norm_coefficient * scale**2
        return None

    def _envelope(self, present: SpectralKernel, x: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """The envelope of keys (B, H, S, D) as log-weights (B, H, S); None where there is none."""
        if not self.feature_map.exponential or self.spectrum is None or present.omega is None:
            return None
        if self.envelope == "simplex":
            return simplex_envelope(x, present.omega, key_mask)
        scale = self._scale()
        if self.envelope == "matched":
            linear_map = self.spectrum.linear_map()
            assert linear_map is not None  # checked when it was built
            return matched_envelope(x, linear_map * scale, key_mask)
        if not self.norm_coefficient:
            return None
        norm = self._number_for_norms()
        if norm is not None:
            return gaussian_envelope(x, norm, key_mask)
        assert isinstance(scale, Tensor)
        return gaussian_envelope(x, self.norm_coefficient, key_mask) * scale.square().squeeze(-1)

    def extra_repr(self) -> str:
        options = [f"feature_map={self.feature_map.name!r}"]
        if self.feature_map.exponential:
            options.append(f"envelope={self.envelope!r}")
            if self.envelope == "gaussian":
                options.append(f"norm_coefficient={self.norm_coefficient:g}")
        if self.feature_map.takes_smoothing:
            options.append(f"smoothing={self.smoothing:g}")
        learned = {"learn_smoothing": self.log_smoothing, "learn_temperature": self.log_temperature}
        options += [f"{name}=True" for name, parameter in learned.items() if parameter is not None]
        options += ["frozen=True"] if self.frozen else []
        if self.spectrum is not None and type(self.spectrum).redraw and not self.spectrum.redraw:
            options.append("redraw=False")
        return ", ".join(options)
