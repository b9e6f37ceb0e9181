"""A generator network as the distribution of frequencies (Eq. 7 and 8 of the paper): omega_m = g(n_m), n_m ~ N(0, I).

    g = [Linear, BatchNorm over the sample, LeakyReLU] x 4, then Linear and tanh

One generator serves all heads of a layer; heads differ in their projections only. Omega is generated once a forward
and used for queries and keys alike (the authors' code runs the generator once for each).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from klformer.checks import check_count
from klformer.errors import ArgumentTypeError
from klformer.kernels.coupling import Coupling, check_coupling, draw_noise
from klformer.kernels.spectrum import SpectralDistribution


class GenerativeSpectrum(SpectralDistribution):
    """Frequencies in (-1, 1)^D from a small network.

    The batch norm uses the statistics of the R samples, in training and in evaluation alike: the whole sample is there
    in both, so that running averages would only add a state that drifts when a forward is repeated (decoding,
    activation checkpointing, pairs of sequences) and when the kernel should be frozen.

    Args:
        num_heads: Heads H.
        head_dim: Size D of a frequency.
        num_frequencies: R; at least 2, for the batch norm.
        noise_dim: Size of n_m; the head size if None.
        hidden_dims: Widths of the hidden layers; four of the head size if None, as in the paper.
        coupling: How the noise vectors of a draw depend on each other; see `kernels/coupling.py`. "antithetic" is for
            "prf".

    Raises:
        ArgumentError: a value is not allowed.
        ArgumentTypeError: hidden_dims is no list or tuple.

    Examples:
        >>> from klformer.kernels import GenerativeSpectrum
        >>> GenerativeSpectrum(num_heads=2, head_dim=8, num_frequencies=32).frequencies().shape
        torch.Size([1, 32, 8])
    """

    noise: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_frequencies: int = 256,
        noise_dim: int | None = None,
        hidden_dims: Sequence[int] | None = None,
        coupling: Coupling = "iid",
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        check_count("num_frequencies", num_frequencies, minimum=2)
        noise_dim = head_dim if noise_dim is None else noise_dim
        if hidden_dims is not None and not isinstance(hidden_dims, list | tuple):
            raise ArgumentTypeError(f"hidden_dims must be a sequence of widths, got {hidden_dims!r}")
        hidden_dims = (head_dim,) * 4 if hidden_dims is None else tuple(hidden_dims)
        check_count("noise_dim", noise_dim)
        for width in hidden_dims:
            check_count("hidden_dims", width)
        layers: list[nn.Module] = []
        size = noise_dim
        for width in hidden_dims:
            layers += [nn.Linear(size, width), nn.BatchNorm1d(width, track_running_stats=False), nn.LeakyReLU(0.01)]
            size = width
        self.generator = nn.Sequential(*layers, nn.Linear(size, head_dim), nn.Tanh())
        check_coupling(coupling)
        self.coupling = coupling
        self.register_buffer("noise", torch.empty(num_frequencies, noise_dim))
        self.resample()

    def resample(self, generator: torch.Generator | None = None) -> None:
        draw_noise(self.noise, generator, self.coupling)

    def frequencies(self) -> Tensor:
        return self.generator(self.noise).unsqueeze(0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, coupling={self.coupling!r}"
