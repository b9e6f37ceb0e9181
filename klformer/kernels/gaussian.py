"""The fixed Gaussian distribution of frequencies, which no training changes: omega ~ N(0, I / lengthscale^2).

With RKS it is the plain RBF kernel; with PRF and norm coefficient 1/2 the softmax kernel of Performer.
"""

import torch
from torch import Tensor

from klformer.checks import check_number
from klformer.kernels.coupling import Coupling, check_coupling, draw_noise
from klformer.kernels.spectrum import SpectralDistribution


class GaussianSpectrum(SpectralDistribution):
    """omega ~ N(0, I / lengthscale^2), shared by all heads.

    Args:
        num_heads: Heads H.
        head_dim: Size D of a frequency.
        num_frequencies: Frequencies R.
        coupling: How the frequencies of a draw depend on each other; see `kernels/coupling.py`. "antithetic" is for
            "prf": it doubles the variance of "rks".
        lengthscale: Width of the kernel.

    Raises:
        ArgumentError: a value is not allowed.

    Examples:
        >>> from klformer.kernels import GaussianSpectrum
        >>> GaussianSpectrum(num_heads=2, head_dim=8, num_frequencies=32).frequencies().shape
        torch.Size([1, 32, 8])
    """

    omega: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_frequencies: int = 256,
        coupling: Coupling = "iid",
        lengthscale: float = 1.0,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        check_coupling(coupling)
        check_number("lengthscale", lengthscale, exclusive=True)
        self.coupling = coupling
        self.lengthscale = lengthscale
        self.register_buffer("omega", torch.empty(1, num_frequencies, head_dim))
        self.resample()

    def resample(self, generator: torch.Generator | None = None) -> None:
        draw_noise(self.omega[0], generator, self.coupling)
        self.omega /= self.lengthscale

    def frequencies(self) -> Tensor:
        return self.omega

    def linear_map(self) -> Tensor:
        return torch.eye(self.head_dim, dtype=self.omega.dtype, device=self.omega.device)[None] / self.lengthscale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, coupling={self.coupling!r}, lengthscale={self.lengthscale:g}"
