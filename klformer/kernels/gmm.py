"""A mixture of Gaussians as the distribution of frequencies (Eq. 4 and 5 of the paper).

    omega_{c,m} = S_c n_m + mu_c,    n_m ~ N(0, I),    weights 1/C
    kappa(d) = 1/C sum_c exp(-1/2 |S_c^T d|^2) cos(mu_c.d)

The paper writes Sigma for S: a square root of the covariance, not the covariance. In its experiments C = 2,
mu_2 = -mu_1 and S_1 = S_2 ("tied"), for which the kernel is exp(-1/2 |S^T d|^2) cos(mu.d) and RKS needs half of the
work (see ops/spectral_product/chunked/pair_offset.py).
"""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from klformer.checks import check_choice, check_count, check_flag
from klformer.errors import ArgumentError
from klformer.kernels.coupling import Coupling, check_coupling, draw_noise
from klformer.kernels.spectrum import SpectralDistribution
from klformer.ops.feature_maps import FeatureMap


class GaussianMixtureSpectrum(SpectralDistribution):
    """C Gaussians a head with learned means and scales; the noise is shared by heads and components, as in the paper.

    Args:
        num_heads: Heads H.
        head_dim: Size D of a frequency.
        num_frequencies: R = C M for the paper's M noise vectors; a multiple of C.
        num_components: C.
        covariance: "full" learns S_c as a matrix, "diagonal" as exp(s_c / 2) on the diagonal. The paper uses a full
            matrix for RKS and a diagonal for PRF, and so do the defaults of `gmm-rks` and `gmm-prf`.
        tied: The two components are at +mu and -mu and share their scale; C must be 2.
        init: "released" is what the authors' code does. Full: S Xavier-uniform as a (H, D, D) tensor and mu ~
            U(+-1/D), so that frequencies are short (norm about 1.4 at D = 64) and the kernel starts broad. Diagonal:
            variances near 1 and mu ~ U(+-1/sqrt D). "identity" starts at unit covariance with means ~ U(+-1/sqrt D):
            near the Gaussian kernel. The default is "released": with RKS at D = 64 a unit covariance starts as noise.
        weights: "equal" gives every component 1/C, as the paper does; "learned" learns them, a head its own. A
            kernel of cosines ("rks") can't tell tied components apart, at +mu and -mu, and refuses it for them.
        coupling: How the noise vectors of a draw depend on each other; see `kernels/coupling.py`. "antithetic" is for
            "prf": it doubles the variance of "rks".

    Raises:
        ArgumentError: a value is not allowed.

    Examples:
        >>> from klformer.kernels import GaussianMixtureSpectrum
        >>> GaussianMixtureSpectrum(num_heads=2, head_dim=8, num_frequencies=32).frequencies().shape
        torch.Size([2, 32, 8])
    """

    defaults_by_map: ClassVar[dict[str, dict[str, Any]]] = {"prf": {"covariance": "diagonal"}}
    noise: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_frequencies: int = 256,
        num_components: int = 2,
        covariance: Literal["full", "diagonal"] = "full",
        tied: bool = True,
        init: Literal["released", "identity"] = "released",
        weights: Literal["equal", "learned"] = "equal",
        coupling: Coupling = "iid",
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        check_count("num_components", num_components)
        check_flag("tied", tied)
        check_choice("covariance", covariance, ("full", "diagonal"))
        check_choice("init", init, ("released", "identity"))
        if tied and num_components != 2:
            raise ArgumentError(
                f"tied needs num_components=2 (means +mu and -mu), got {num_components}; pass tied=False"
            )
        check_choice("weights", weights, ("equal", "learned"))
        check_coupling(coupling)
        if num_frequencies % num_components:
            raise ArgumentError(
                f"num_frequencies must be a multiple of num_components={num_components}, got {num_frequencies}"
            )
        self.num_components = num_components
        self.covariance_kind = covariance
        self.tied = tied
        self.init = init
        num_learned = 1 if tied else num_components
        self.mean = nn.Parameter(torch.empty(num_heads, num_learned, head_dim))
        scale_shape = (head_dim, head_dim) if covariance == "full" else (head_dim,)
        #: S itself if full, (H, C, D, D); the logarithm of the variances if diagonal, (H, C, D).
        self.scale = nn.Parameter(torch.empty(num_heads, num_learned, *scale_shape))
        #: Logarithms of the weights but for a constant, (H, C).
        self.logits = nn.Parameter(torch.zeros(num_heads, num_components)) if weights == "learned" else None
        self.coupling = coupling
        self.register_buffer("noise", torch.empty(num_frequencies // num_components, head_dim))
        self.reset_parameters()
        self.resample()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial means and scales again, from torch's own generator.

        Examples:
            >>> import torch
            >>> from klformer.kernels import GaussianMixtureSpectrum
            >>> spectrum = GaussianMixtureSpectrum(num_heads=2, head_dim=3)
            >>> before = spectrum.mean.clone()
            >>> spectrum.reset_parameters()
            >>> torch.equal(before, spectrum.mean)
            False
        """
        full = self.covariance_kind == "full"
        mean_bound = 1 / self.head_dim if full and self.init == "released" else self.head_dim**-0.5
        nn.init.uniform_(self.mean, -mean_bound, mean_bound)
        for component in self.scale.unbind(1):
            if self.init == "released":
                nn.init.xavier_uniform_(component)
            elif full:
                component.copy_(torch.eye(self.head_dim))
            else:
                component.zero_()

    def resample(self, generator: torch.Generator | None = None) -> None:
        draw_noise(self.noise, generator, self.coupling)

    def frequencies(self) -> Tensor:
        centred = self._centred()
        if self.tied:
            mean = self.mean.squeeze(1).unsqueeze(-2)
            return torch.cat([centred.squeeze(1) + mean, centred.squeeze(1) - mean], dim=-2)
        return (centred + self.mean.unsqueeze(-2)).flatten(1, 2)  # (H, C, M, D) -> (H, R, D)

    def paired_frequencies(self) -> tuple[Tensor, Tensor] | None:
        return (self._centred().squeeze(1), self.mean.squeeze(1)) if self.tied and self.logits is None else None

    def log_weights(self) -> Tensor | None:
        if self.logits is None:
            return None
        # Relative to equal weights: the kernel's value at distance 0 stays 1.
        relative = self.logits.log_softmax(-1) + math.log(self.num_components)
        return relative.repeat_interleave(self.num_frequencies // self.num_components, dim=-1)

    def check_map(self, feature_map: FeatureMap) -> None:
        if self.tied and self.logits is not None and not feature_map.exponential:
            raise ArgumentError(
                f"weights='learned' needs components with means of their own for {feature_map.name!r}, whose cosines "
                "are the same at +mu and -mu; pass tied=False"
            )

    def linear_map(self) -> Tensor | None:
        if self.scale.shape[1] > 1:
            return None
        if self.covariance_kind == "diagonal":
            return torch.diag_embed((self.scale.squeeze(1) / 2).exp())
        return self.scale.squeeze(1).transpose(-1, -2)

    def covariance(self) -> Tensor:
        """S S^T of every head and component.

        Returns:
            (H, C, D, D); tied components are listed once.

        Examples:
            >>> from klformer.kernels import GaussianMixtureSpectrum
            >>> spectrum = GaussianMixtureSpectrum(num_heads=2, head_dim=3, init="identity")
            >>> spectrum.covariance().shape
            torch.Size([2, 1, 3, 3])
            >>> spectrum.covariance()[0, 0].diagonal().tolist()
            [1.0, 1.0, 1.0]
        """
        if self.covariance_kind == "diagonal":
            return torch.diag_embed(self.scale.exp())
        return self.scale @ self.scale.transpose(-1, -2)

    def _centred(self) -> Tensor:
        """S_c n_m, (H, C, M, D)."""
        if self.covariance_kind == "diagonal":
            return self.noise * (self.scale / 2).exp().unsqueeze(-2)
        return self.noise @ self.scale.transpose(-1, -2)

    def extra_repr(self) -> str:
        weights = "equal" if self.logits is None else "learned"
        return (
            f"{super().extra_repr()}, num_components={self.num_components}, covariance={self.covariance_kind!r}, "
            f"tied={self.tied}, init={self.init!r}, weights={weights!r}, coupling={self.coupling!r}"
        )
