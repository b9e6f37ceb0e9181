"""What a kernel has become: its shape along directions, a sample of its frequencies, and where its attention goes.

Everything is an average over draws of the frequencies, in the coordinates after the scaling by D^(-1/4).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from klformer.attention.base import AttentionMechanism
from klformer.attention.kernelized import KernelizedAttention
from klformer.errors import ArgumentError
from klformer.kernels import GaussianMixtureSpectrum, SpectralDistribution
from klformer.lab.analysis.eigenvalues import covariance
from klformer.noise import kept_noise, resample


@dataclass(frozen=True)
class KernelProfile:
    """kappa(u, (1 + delta) u) / kappa(u, u) for a unit vector u: the key moves away from the query along u."""

    delta: Tensor  # (n,)
    mean: Tensor  # (H, n), over the draws
    deviation: Tensor  # (H, n), of a single draw


@torch.no_grad()
def main_directions(spectrum: SpectralDistribution, count: int, *, draws: int, seed: int) -> Tensor:
    """Return the directions (H, count, D) in which the frequencies vary most, so in which the kernel is narrowest."""
    of_heads = covariance(spectrum, draws=draws, generator=torch.Generator().manual_seed(seed)).mean(1)
    if isinstance(spectrum, GaussianMixtureSpectrum):
        # The components' means are apart as well; tied ones are mu and -mu.
        mean = spectrum.mean.double() - (0 if spectrum.tied else spectrum.mean.double().mean(1, keepdim=True))
        of_heads = of_heads + (mean.transpose(1, 2) @ mean) / mean.shape[1]
    vectors = torch.linalg.eigh(of_heads).eigenvectors  # ascending, in columns
    directions = vectors.flip(-1)[..., :count].transpose(-1, -2)
    return directions.expand(spectrum.num_heads, -1, -1)


@torch.no_grad()
def kernel_profile(
    attention: KernelizedAttention, direction: Tensor, delta: Tensor, *, draws: int, seed: int
) -> KernelProfile:
    """Return the kernel of every head along its direction (H, D)."""
    scale = attention.kernel.input_scale
    unit = direction.double().unsqueeze(1) / scale  # features() multiplies by the scale again
    queries, keys = unit.unsqueeze(0), (unit * (1 + delta).view(-1, 1)).unsqueeze(0)
    values, norms = [], []
    for _ in over_draws(attention, draws, seed):
        values.append(attention.kernel.estimate(queries, keys)[0, :, 0])
        norms.append(attention.kernel.estimate(queries, queries)[0, :, 0])
    # Divided by the mean over the draws: a mean of quotients would be biased.
    stacked = torch.stack(values) / torch.stack(norms).mean(0)
    return KernelProfile(delta, stacked.mean(0), stacked.std(0) if draws > 1 else torch.zeros_like(stacked[0]))


@torch.no_grad()
def sample_frequencies(spectrum: SpectralDistribution, *, draws: int, seed: int) -> Tensor:
    """Return the frequencies of all draws, (H, draws R, D)."""
    samples = [spectrum.frequencies().double() for _ in over_draws(spectrum, draws, seed)]
    return torch.cat(samples, dim=1).expand(spectrum.num_heads, -1, -1)


def over_draws(module: nn.Module, draws: int, seed: int) -> Iterator[int]:
    """Draw the noise of a module anew for every turn; it is as before at the end."""
    generator = torch.Generator().manual_seed(seed)
    with kept_noise(module):
        for draw in range(draws):
            resample(module, generator)
            yield draw


@torch.no_grad()
def attention_of_first_token(model: nn.Module, run: Callable[[], object], *, draws: int, seed: int) -> list[Tensor]:
    """Return where the first token (CLS) of the first sequence attends, (H, S) a layer, averaged over draws."""
    for module in model.modules():
        if isinstance(module, AttentionMechanism) and not isinstance(module, KernelizedAttention):
            raise ArgumentError(f"{type(module).__name__} is not a kernel: it has no features to look at")
    totals: list[Tensor] = []
    for _ in over_draws(model, draws, seed):
        with _watched(model) as seen:
            run()
        rows = [_first_row(attention, *operands) for attention, operands in seen]
        totals = [a + b for a, b in zip(totals, rows, strict=True)] if totals else rows
    return [total / draws for total in totals]


def _first_row(attention: KernelizedAttention, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return the normalised weights of the first query, (H, S)."""
    phi_q, phi_k = attention.features(q[:1, :, :1].double(), "query"), attention.features(k[:1].double(), "key")
    weights = (phi_q @ phi_k.transpose(-1, -2))[0, :, 0]
    if key_mask is not None:
        weights = weights * key_mask[0]
    return weights / weights.sum(-1, keepdim=True)


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[KernelizedAttention, tuple[Tensor, Tensor, Tensor | None]]]]:
    """Collect what every kernel attention of the model is given inside."""
    seen: list[tuple[KernelizedAttention, tuple[Tensor, Tensor, Tensor | None]]] = []

    def keep(module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor | None]) -> None:
        assert isinstance(module, KernelizedAttention)
        seen.append((module, (arguments[0], arguments[1], named.get("key_mask"))))

    handles = [
        module.register_forward_pre_hook(keep, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, KernelizedAttention)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
