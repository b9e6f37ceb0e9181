"""What a model has learned about its frequencies: eigenvalues of their covariance, by layer and head."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from klformer.kernels import GaussianMixtureSpectrum, SpectralDistribution
from klformer.noise import kept_noise


@dataclass(frozen=True)
class HeadSpectrum:
    """Eigenvalues of the covariance of one head, ascending."""

    layer: int
    head: int
    eigenvalues: Tensor  # (D,), or (C D,) of all components of a mixture that is not tied


def spectra_of(model: nn.Module) -> Iterator[SpectralDistribution]:
    """The distributions of a model, from the first layer to the last."""
    for module in model.modules():
        if isinstance(module, SpectralDistribution):
            yield module


@torch.no_grad()
def covariance(spectrum: SpectralDistribution, *, draws: int = 64, generator: torch.Generator | None = None) -> Tensor:
    """Covariance of the frequencies, (H or 1, C, D, D).

    A Gaussian mixture has one for every component in closed form (tied components are listed once). Of any other
    distribution it is estimated from the frequencies of so many draws; its noise is put back afterwards.
    """
    if isinstance(spectrum, GaussianMixtureSpectrum):
        return spectrum.covariance().double()
    samples = []
    with kept_noise(spectrum):
        for _ in range(draws):
            spectrum.resample(generator)
            samples.append(spectrum.frequencies().double())
    omega = torch.cat(samples, dim=1)  # (H or 1, draws R, D)
    centred = omega - omega.mean(1, keepdim=True)
    return (centred.transpose(1, 2) @ centred / (omega.shape[1] - 1)).unsqueeze(1)


def eigenvalues(model: nn.Module, *, draws: int = 64, seed: int = 0) -> list[HeadSpectrum]:
    """Eigenvalues by layer and head, both counted from 1 as in the paper."""
    found = []
    for layer, spectrum in enumerate(spectra_of(model), start=1):
        generator = torch.Generator().manual_seed(seed)
        values = torch.linalg.eigvalsh(covariance(spectrum, draws=draws, generator=generator))
        for head, of_head in enumerate(values.flatten(1), start=1):
            found.append(HeadSpectrum(layer, head, of_head.clamp(min=0).sort().values))
    return found
