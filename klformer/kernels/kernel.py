"""A kernel = a spectral distribution x a feature map; LinearElu's is the one without a distribution."""

import torch
from torch import Tensor, nn

from klformer.checks import check_choice, check_flag, check_number
from klformer.errors import ArgumentError
from klformer.kernels.spectrum import SpectralDistribution
from klformer.ops.decoding import SpectralDecoder
from klformer.ops.feature_maps import FEATURE_MAP_NAMES
from klformer.ops.spectral_product import spectral_product


class Kernel(nn.Module):
    """kappa(q, k) = E phi(q).phi(k) + smoothing, estimated with the frequencies that the distribution holds.

    Inputs are multiplied by D^(-1/4) before the map, so that q.k has the temperature 1/sqrt D of softmax attention;
    "elu" takes them as they are.

    Args:
        feature_map: "rks", "prf" or "elu".
        spectrum: Where the frequencies come from; None for "elu".
        norm_coefficient: c of exp(omega.x - c |x|^2), "prf" only.
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
        check_choice("feature_map", feature_map, FEATURE_MAP_NAMES)
        if (spectrum is None) != (feature_map == "elu"):
            raise ArgumentError(f"feature_map {feature_map!r} does not go with spectrum {spectrum}")
        check_number("norm_coefficient", norm_coefficient)
        check_number("smoothing", smoothing)
        check_flag("frozen", frozen)
        if smoothing and feature_map != "rks":
            raise ArgumentError(f"smoothing must be 0 for {feature_map!r}, got {smoothing!r}")
        self.feature_map = feature_map
        self.spectrum = spectrum
        self.smoothing = smoothing
        self.input_scale = 1.0 if spectrum is None else spectrum.head_dim**-0.25
        self.norm_coefficient = norm_coefficient
        if frozen and spectrum is not None:
            spectrum.requires_grad_(False)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Attention with this kernel; shapes as in `spectral_product`."""
        operands = self.decoder()
        return spectral_product(
            q,
            k,
            v,
            operands.omega,
            feature_map=self.feature_map,
            mean=operands.mean,
            key_mask=key_mask,
            norm_coefficient=operands.norm_coefficient,
            smoothing=operands.smoothing,
            causal=causal,
        )

    def decoder(self) -> SpectralDecoder:
        """The kernel with its present frequencies, the scaling of the inputs folded into them."""
        omega = mean = None
        if self.spectrum is not None:
            with self.spectrum.in_full_precision():
                # Only RKS has a cheaper form for a tied pair of components.
                if self.feature_map == "rks":
                    omega, mean = self.spectrum.factors()
                else:
                    omega = self.spectrum.frequencies()
                omega = omega * self.input_scale
                mean = None if mean is None else mean * self.input_scale
        return SpectralDecoder(
            omega=omega,
            mean=mean,
            feature_map=self.feature_map,
            norm_coefficient=self.norm_coefficient * self.input_scale**2,
            smoothing=self.smoothing,
        )

    def features(self, x: Tensor) -> Tensor:
        """Explicit features (B, H, L, F): their inner products are the kernel that attention uses, smoothing included.

        For analysis: differentiable, of the size of the whole sequence, and without the shifts that keep attention
        from overflowing.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.spectrum is None:
            return nn.functional.elu(x) + 1
        with self.spectrum.in_full_precision():
            x = x * self.input_scale
            projections = x @ self.spectrum.frequencies().to(x.dtype).transpose(-1, -2)
            count = projections.shape[-1] ** 0.5
            if self.feature_map == "prf":
                norms = x.square().sum(-1, keepdim=True)
                return (projections - self.norm_coefficient * norms).exp() / count
            features = torch.cat([projections.cos(), projections.sin()], dim=-1) / count
            if not self.smoothing:
                return features
            constant = features.new_full((*features.shape[:-1], 1), self.smoothing**0.5)
            return torch.cat([features, constant], dim=-1)

    def extra_repr(self) -> str:
        options = {"prf": f", norm_coefficient={self.norm_coefficient:g}", "rks": f", smoothing={self.smoothing:g}"}
        return f"feature_map={self.feature_map!r}{options.get(self.feature_map, '')}"
