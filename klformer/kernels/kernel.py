"""A kernel = a spectral distribution x a feature map x an envelope; LinearElu's is the one without a distribution."""

from typing import Literal

import torch
from torch import Tensor, nn

from klformer.checks import check_choice, check_flag, check_number
from klformer.errors import ArgumentError
from klformer.kernels.spectrum import SpectralDistribution
from klformer.ops.envelopes import gaussian_envelope
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product import SpectralKernel, SpectralOperands, attend, decoding, kept_keys
from klformer.ops.spectral_product.state import KeyValueState

Role = Literal["query", "key"]


class Kernel(nn.Module):
    """kappa(q, k) = E phi(q).phi(k) + smoothing, estimated with the frequencies that the distribution holds.

    Inputs are multiplied by D^(-1/4) before the map, so that q.k has the temperature 1/sqrt D of softmax attention;
    "elu" takes them as they are.

    Args:
        feature_map: "rks", "prf" or "elu".
        spectrum: Where the frequencies come from; None for "elu".
        norm_coefficient: c of the envelope exp(-c |x|^2), for exponential maps ("prf") only.
        smoothing: Constant added to the kernel (its value at distance 0 is 1), "rks" only. Estimates of an RKS kernel
            can be negative, and so can their sum, by which attention divides; from 1 on they can't (the cosines are
            >= -1).
        frozen: Leave the distribution as it was initialised; only its noise changes.
    """

    def __init__(
        self,
        feature_map: str,
        spectrum: SpectralDistribution | None,
        *,
        norm_coefficient: float = 1.0,
        smoothing: float = 0.0,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        check_choice("feature_map", feature_map, FEATURE_MAPS)
        self.feature_map = FEATURE_MAPS[feature_map]
        if (spectrum is not None) != self.feature_map.needs_frequencies:
            raise ArgumentError(f"feature_map {feature_map!r} does not go with spectrum {spectrum}")
        check_number("norm_coefficient", norm_coefficient)
        check_number("smoothing", smoothing)
        check_flag("frozen", frozen)
        if smoothing and not self.feature_map.takes_smoothing:
            raise ArgumentError(f"smoothing must be 0 for {feature_map!r}, got {smoothing!r}")
        self.spectrum = spectrum
        self.smoothing = smoothing
        self.input_scale = 1.0 if spectrum is None else spectrum.head_dim**-0.25
        self.norm_coefficient = norm_coefficient
        if frozen and spectrum is not None:
            spectrum.requires_grad_(False)

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
        """Attention with this kernel; shapes as in `spectral_product`, to which they must have been checked to fit."""
        mask = kept_keys(key_mask, key_bias)
        bias = self.log_weights(k, mask, key_bias)
        operands = SpectralOperands(self.present(), q, k, v, key_mask=mask, key_bias=bias, causal=causal)
        return attend(operands)

    def present(self) -> SpectralKernel:
        """The kernel with its present frequencies, the scaling of the inputs folded into them."""
        if self.spectrum is None:
            return SpectralKernel(self.feature_map)
        with full_precision(self.spectrum.anchor()):
            # Only RKS has a cheaper form for pairs of frequencies.
            pairs = self.spectrum.paired_frequencies() if self.feature_map.name == "rks" else None
            omega, offset = (self.spectrum.frequencies(), None) if pairs is None else pairs
            smoothing = omega.new_full((1,), self.smoothing) if self.smoothing else None
            return SpectralKernel(
                self.feature_map,
                omega=omega * self.input_scale,
                pair_offset=None if offset is None else offset * self.input_scale,
                frequency_bias=None if pairs is not None else self.spectrum.log_weights(),
                smoothing=smoothing,
            )

    def absorb(
        self,
        present: SpectralKernel,
        state: KeyValueState,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> KeyValueState:
        """The state of decoding after more keys (B, H, S, D) and values (B, H, S, E); `present` is `present()`."""
        mask = kept_keys(key_mask, key_bias)
        bias = self.log_weights(k, mask, key_bias)
        return decoding.absorb(present, state, k, v, key_mask=mask, key_bias=bias)

    def log_weights(self, k: Tensor, key_mask: Tensor | None, key_bias: Tensor | None = None) -> Tensor | None:
        """The log-weights of keys (B, H, S, D): their envelope, and those that are given.

        Args:
            key_mask: (B or 1, H or 1, S), True = keep.
            key_bias: (B or 1, H or 1, S).
        """
        if not self.feature_map.exponential or not self.norm_coefficient:
            return key_bias
        envelope = gaussian_envelope(k, self.norm_coefficient * self.input_scale**2, key_mask)
        return envelope if key_bias is None else envelope + key_bias

    def features(self, x: Tensor, role: Role) -> Tensor:
        """Explicit features (B, H, L, F): phi(q).phi(k) is what attention weighs a key with, smoothing included, but
        for a factor of the query that cancels there: an envelope belongs to keys.

        For analysis: differentiable, of the size of the whole sequence, and without the shifts that keep attention
        from overflowing.
        """
        with full_precision(x) as dtype:
            x, kernel = x.to(dtype), self.present()
            if kernel.omega is None:
                return self.feature_map.explicit(x)
            assert self.spectrum is not None
            omega = self.spectrum.frequencies().to(dtype) * self.input_scale
            scores = x @ omega.transpose(-1, -2)
            count = omega.shape[-2] ** 0.5
            log_weight = scores.new_zeros(1)
            if (frequency_bias := self.spectrum.log_weights()) is not None:
                log_weight = frequency_bias.to(dtype).unsqueeze(-2) / 2
            if role == "key" and (bias := self.log_weights(x, None)) is not None:
                log_weight = log_weight + bias.unsqueeze(-1)
            features = self.feature_map.explicit(scores, log_weight) / count
            if not self.smoothing:
                return features
            constant = features.new_full((*features.shape[:-1], 1), self.smoothing**0.5)
            return torch.cat([features, constant], dim=-1)

    def estimate(self, q: Tensor, k: Tensor) -> Tensor:
        """The kernel itself for all pairs of q (B, H, L, D) and k (B, H, S, D): (B, H, L, S). For analysis."""
        products = self.features(q, "query") @ self.features(k, "key").transpose(-1, -2)
        envelope = self.log_weights(q, None)
        return products if envelope is None else products * envelope.exp().unsqueeze(-1)

    def extra_repr(self) -> str:
        options = {"prf": f", norm_coefficient={self.norm_coefficient:g}", "rks": f", smoothing={self.smoothing:g}"}
        return f"feature_map={self.feature_map.name!r}{options.get(self.feature_map.name, '')}"
