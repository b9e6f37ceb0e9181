"""The fixed Gaussian distribution of frequencies, which no training changes: omega ~ N(0, I / lengthscale^2).

With RKS it is the plain RBF kernel; with PRF and norm coefficient 1/2 the softmax kernel of Performer.
"""

from typing import Literal

import torch
from torch import Tensor

from klformer.checks import check_choice, check_number
from klformer.kernels.spectrum import SpectralDistribution, draw_normal, draw_norms


class GaussianSpectrum(SpectralDistribution):
    """omega ~ N(0, I / lengthscale^2), shared by all heads.

    Args:
        coupling: "iid" draws every frequency by itself. "orthogonal" makes them orthogonal in blocks of D, with norms
            drawn as those of Gaussian vectors: each has the same distribution as before, and the estimate of the
            kernel a lower variance.
        lengthscale: Width of the kernel.
    """

    omega: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_frequencies: int = 256,
        coupling: Literal["iid", "orthogonal"] = "iid",
        lengthscale: float = 1.0,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        check_choice("coupling", coupling, ("iid", "orthogonal"))
        check_number("lengthscale", lengthscale, exclusive=True)
        self.coupling = coupling
        self.lengthscale = lengthscale
        self.register_buffer("omega", torch.empty(1, num_frequencies, head_dim))
        self.resample()

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        if self.coupling == "iid":
            draw_normal(self.omega, generator)
        else:
            num_blocks = -(-self.num_frequencies // self.head_dim)
            square = torch.empty(num_blocks, self.head_dim, self.head_dim)
            draw_normal(square, generator)
            directions, upper = torch.linalg.qr(square)
            # QR fixes signs by convention; undo it, so that the directions are uniform.
            directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
            norms = draw_norms((num_blocks, self.head_dim), self.head_dim, generator).to(directions.device)
            rows = (directions.transpose(-1, -2) * norms.unsqueeze(-1)).flatten(0, 1)
            self.omega.copy_(rows[: self.num_frequencies])
        self.omega /= self.lengthscale

    def frequencies(self) -> Tensor:
        return self.omega
