"""Where a kernel starts: from the queries and keys that it will see.

An atom at omega = c / sqrt D, with c the mean of a cluster of keys, has the feature exp(c.q / sqrt D) of a query: what
softmax gives the keys of that cluster. The features of a key, which the simplex envelope makes sum to one, say to which
clusters it belongs. That is attention to quantised keys, before anything is learned. A mixture of Gaussians with means
of their own starts in the same way, with the variances of the clusters.
"""

import torch
from torch import Tensor, nn

from klformer.attention import AttentionMechanism
from klformer.attention.kernelized import KernelizedAttention
from klformer.conversion.hosts import Call
from klformer.kernels import GaussianMixtureSpectrum, Kernel, SpectralDistribution
from klformer.kernels.atoms import AtomSpectrum

#: Keys of a site that are looked at, and rounds of clustering.
MAX_KEYS = 4096
ROUNDS = 12
#: Of a component: a cluster may be a single key.
LEAST_VARIANCE = 1e-3


class KeySample:
    """Some keys of a site, as many as MAX_KEYS, from the batches that were seen."""

    def __init__(self, num_batches: int, generator: torch.Generator) -> None:
        self._share = max(1, MAX_KEYS // num_batches)
        self._generator = generator
        self._keys: list[Tensor] = []

    def add(self, call: Call) -> None:
        keys = call.k.transpose(0, 1).flatten(1, 2)  # (H, B S, D)
        if call.key_mask is not None:
            keys = keys[:, call.key_mask.flatten()]
        chosen = torch.randperm(keys.shape[1], generator=self._generator)[: self._share]
        self._keys.append(keys[:, chosen.to(keys.device)].float())

    def keys(self) -> Tensor:
        """(H, N, D)."""
        return torch.cat(self._keys, dim=1)


def can_start_from_keys(mechanism: AttentionMechanism) -> bool:
    """Whether `start_from_keys` does anything."""
    return atoms_of(mechanism) is not None or mixture_of(mechanism) is not None


@torch.no_grad()
def start_from_keys(mechanism: AttentionMechanism, keys: Tensor, generator: torch.Generator) -> None:
    """Put the atoms of a mechanism, or the components of its mixture, where the keys (H, N, D) are."""
    # Kernels multiply their inputs by D^(-1/4): together that is 1 / sqrt D.
    keys = keys * keys.shape[-1] ** -0.25
    if (atoms := atoms_of(mechanism)) is not None:
        atoms.omega.copy_(cluster_means(keys, atoms.num_frequencies, generator))
        atoms.log_weight.zero_()
    elif (mixture := mixture_of(mechanism)) is not None:
        means = cluster_means(keys, mixture.num_components, generator)
        variances = variances_around(means, keys)
        mixture.mean.copy_(means)
        mixture.scale.copy_(variances.log() if mixture.covariance_kind == "diagonal" else variances.sqrt().diag_embed())


def variances_around(means: Tensor, points: Tensor) -> Tensor:
    """Variances (H, C, D) of clusters of points (H, N, D), of those that are nearest to each mean (H, C, D)."""
    nearest = torch.cdist(points, means).argmin(-1)
    index = nearest.unsqueeze(-1).expand_as(points)
    squares = (points - means.gather(1, index)).square()
    sizes = points.new_zeros(means.shape[:2]).scatter_add_(1, nearest, torch.ones_like(nearest, dtype=points.dtype))
    sums = torch.zeros_like(means).scatter_add_(1, index, squares)
    return (sums / sizes.clamp(min=1).unsqueeze(-1)).clamp(min=LEAST_VARIANCE)


def cluster_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Means (H, count, D) of clusters of points (H, N, D), by k-means from random points."""
    heads, number, dim = points.shape
    # With fewer points than clusters, points are taken more than once, and moved a little to be told apart.
    picks = torch.cat([torch.randperm(number, generator=generator) for _ in range(-(-count // number))])[:count]
    centres = points[:, picks.to(points.device)].clone()
    if count > number:
        centres += points.std() * 0.05 * torch.randn(centres.shape, generator=generator).to(centres)
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(-1)
        sums = torch.zeros_like(centres).scatter_add_(1, nearest.unsqueeze(-1).expand(-1, -1, dim), points)
        sizes = points.new_zeros(heads, count).scatter_add_(1, nearest, torch.ones_like(nearest, dtype=points.dtype))
        centres = torch.where(sizes.unsqueeze(-1) > 0, sums / sizes.clamp(min=1).unsqueeze(-1), centres)
    return centres


def kernel_of(mechanism: nn.Module) -> Kernel | None:
    """The kernel of a mechanism; None if it has none."""
    return mechanism.kernel if isinstance(mechanism, KernelizedAttention) else None


def atoms_of(mechanism: nn.Module) -> AtomSpectrum | None:
    """The atoms of a mechanism whose positive features sum to one over the frequencies; None if it has no such."""
    spectrum = _spectrum_on_simplex(mechanism)
    return spectrum if isinstance(spectrum, AtomSpectrum) else None


def mixture_of(mechanism: nn.Module) -> GaussianMixtureSpectrum | None:
    """The same for a mixture whose components have means of their own."""
    spectrum = _spectrum_on_simplex(mechanism)
    return spectrum if isinstance(spectrum, GaussianMixtureSpectrum) and not spectrum.tied else None


def _spectrum_on_simplex(mechanism: nn.Module) -> SpectralDistribution | None:
    kernel = kernel_of(mechanism)
    if kernel is None or kernel.envelope != "simplex" or not kernel.feature_map.exponential:
        return None
    return kernel.spectrum
