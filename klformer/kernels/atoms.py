"""Atoms: the frequencies themselves are the parameters, and so are their weights. The limit of all distributions.

    kappa(q, k) = 1/R sum_r exp(a_r) phi_r(q).phi_r(k),      omega_r and a_r learned, a head its own

There is no noise: the kernel is deterministic, and nothing is averaged over draws.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from klformer.checks import check_choice, check_number
from klformer.kernels.coupling import orthogonal_rows
from klformer.kernels.gaussian import GaussianSpectrum
from klformer.kernels.spectrum import SPECTRA, SpectralDistribution

PAIRS, ORTHOGONAL = "pairs", "orthogonal"


class AtomSpectrum(SpectralDistribution):
    """R learned frequencies with learned weights a head.

    Args:
        num_heads: Heads H.
        head_dim: Size D of a frequency.
        num_frequencies: Frequencies R.
        start: "orthogonal" starts from rows that are orthogonal in blocks of D, "pairs" from such rows and their
            negatives, which is the default of positive features; Fourier features can't tell the two of a pair apart,
            and never would. The norm is 1 / lengthscale for queries and keys as they come (without the factor
            D^(-1/4)). Short frequencies learn at the usual rates; with rows of norm sqrt(D) training diverges. The
            name of another distribution ("gmm", "gaussian") starts from a draw of it.
        lengthscale: Divides the frequencies at the start.

    Raises:
        ArgumentError: a value is not allowed.

    Examples:
        >>> from klformer.kernels import AtomSpectrum
        >>> AtomSpectrum(num_heads=2, head_dim=8, num_frequencies=32).frequencies().shape
        torch.Size([2, 32, 8])
    """

    defaults_by_map: ClassVar[dict[str, dict[str, Any]]] = {"prf": {"envelope": "simplex", "start": PAIRS}}
    redraw = False

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_frequencies: int = 128,
        start: str = ORTHOGONAL,
        lengthscale: float = 1.0,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        check_choice("start", start, (PAIRS, ORTHOGONAL, *_distributions()))
        check_number("lengthscale", lengthscale, exclusive=True)
        self.start = start
        self.lengthscale = lengthscale
        first = self._first_frequencies().to(torch.empty(0).device)  # the device of the moment may be meta
        self.omega = nn.Parameter(first / lengthscale)
        #: Logarithms of the weights, (H, R).
        self.log_weight = nn.Parameter(torch.zeros(num_heads, num_frequencies))

    @torch.no_grad()
    def _first_frequencies(self) -> Tensor:
        """(H, R, D)."""
        if self.start not in (PAIRS, ORTHOGONAL):
            sizes = {"num_heads": self.num_heads, "head_dim": self.head_dim, "num_frequencies": self.num_frequencies}
            draw = _distributions()[self.start](**sizes).frequencies()
            return draw.expand(self.num_heads, -1, -1).clone()
        count = -(-self.num_frequencies // 2) if self.start == PAIRS else self.num_frequencies
        rows = torch.stack([orthogonal_rows(count, self.head_dim, None) for _ in range(self.num_heads)])
        if self.start == PAIRS:
            rows = torch.cat([rows, -rows], dim=1)[:, : self.num_frequencies]
        # Kernels multiply their inputs by D^(-1/4), which is undone here.
        return rows * self.head_dim**0.25

    def resample(self, generator: torch.Generator | None = None) -> None:
        pass  # nothing is random

    def frequencies(self) -> Tensor:
        return self.omega

    def log_weights(self) -> Tensor:
        return self.log_weight

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, start={self.start!r}, lengthscale={self.lengthscale:g}"


def _distributions() -> dict[str, type[SpectralDistribution]]:
    """Those that atoms can start from: the Gaussian, which is not learned, and the registered ones but for atoms."""
    learned = {name: SPECTRA[name] for name in SPECTRA if SPECTRA[name] is not AtomSpectrum}
    return {"gaussian": GaussianSpectrum, **learned}
