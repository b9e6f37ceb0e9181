"""A kernel of your own: frequencies from a Laplace distribution, whose widths are learned.

The Fourier transform of a Laplace distribution is a product of Cauchy kernels, 1 / (1 + (b d)^2). Their tails are
heavy: keys far away from a query still count. The file is a plugin as well:

    klformer --plugin examples/own_kernel.py train --task recall --attention laplace-rks
"""

import torch
from torch import Tensor, nn

import klformer


class LaplaceSpectrum(klformer.SpectralDistribution):
    """Frequencies with independent Laplace components of learned width, one for each head and dimension."""

    def __init__(self, *, num_heads: int, head_dim: int, num_frequencies: int = 128, width: float = 0.5) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        self.log_width = nn.Parameter(torch.full((num_heads, 1, head_dim), width).log())  # stays positive
        self.register_buffer("noise", torch.empty(num_frequencies, head_dim))  # saved with the weights
        self.resample()

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        """New noise in place: the only moment at which anything random happens."""
        uniform = torch.rand(self.noise.shape, generator=generator) - 0.5
        self.noise.copy_(-uniform.sign() * torch.log1p(-2 * uniform.abs()))

    def frequencies(self) -> Tensor:
        """Omega (H, R, D), differentiable in the widths."""
        return self.noise * self.log_width.exp()


klformer.register_spectrum("laplace", LaplaceSpectrum)  # gives the attentions laplace-rks and laplace-prf

if __name__ == "__main__":
    torch.manual_seed(0)
    attention = klformer.build_attention(
        "laplace-rks", num_heads=1, head_dim=1, num_frequencies=20_000, width=1.0, smoothing=0.0
    )
    query, distance = torch.zeros(1, 1, 1, 1), torch.tensor([0.0, 1.0, 2.0, 4.0])
    estimate = attention.kernel.estimate(query, distance.view(1, 1, 4, 1)).flatten()
    for d, estimated, exact in zip(distance.tolist(), estimate.tolist(), (1 / (1 + distance**2)).tolist(), strict=True):
        print(f"distance {d:.0f}: estimated {estimated:.3f}, exact {exact:.3f}")
    layer = klformer.MultiheadAttention(model_dim=32, num_heads=2, attention="laplace-prf:num_frequencies=64,width=0.3")
    layer(torch.randn(2, 100, 32)).sum().backward()
    print("widths have gradients:", layer.mechanism.kernel.spectrum.log_width.grad.abs().sum().item() > 0)
