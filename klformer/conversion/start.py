"""Where a kernel starts: from the queries and keys that it will see.

An atom at omega = c / sqrt D, with c the mean of a cluster of keys, has the feature exp(c.q / sqrt D) of a query: what
softmax gives the keys of that cluster. The features of a key, which the simplex envelope makes sum to one, say to which
clusters it belongs. That is attention to quantised keys, before anything is learned.
"""

import torch
from torch import Tensor, nn

from klformer.attention import AttentionMechanism
from klformer.attention.kernelized import KernelizedAttention
from klformer.conversion.hosts import Call
from klformer.kernels import Kernel
from klformer.kernels.atoms import AtomSpectrum

#: Keys of a site that are looked at, and rounds of clustering.
MAX_KEYS = 4096
ROUNDS = 12


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
    return atoms_of(mechanism) is not None


@torch.no_grad()
def start_from_keys(mechanism: AttentionMechanism, keys: Tensor, generator: torch.Generator) -> None:
    """Put the atoms of a mechanism where the keys (H, N, D) are."""
    atoms = atoms_of(mechanism)
    assert atoms is not None
    centres = cluster_means(keys, atoms.num_frequencies, generator)
    # Kernels multiply their inputs by D^(-1/4): together that is 1 / sqrt D.
    atoms.omega.copy_(centres * atoms.head_dim**-0.25)
    atoms.log_weight.zero_()


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
    kernel = kernel_of(mechanism)
    if kernel is None or kernel.envelope != "simplex" or not kernel.feature_map.exponential:
        return None
    return kernel.spectrum if isinstance(kernel.spectrum, AtomSpectrum) else None
