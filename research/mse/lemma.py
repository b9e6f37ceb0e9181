"""Lemma S.2, as printed, corrected, and by simulation: with omega ~ N(0, I), phi(x).phi(y) is a Gaussian kernel."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.checks import check_count
from research.mse.measure import chunks


def kernel(x: Tensor, y: Tensor) -> float:
    """exp(-|x - y|^2 / 2), what both maps of Lemma S.2 are to give with omega ~ N(0, I)."""
    return math.exp(-(x - y).square().sum().item() / 2)


def rks_printed(x: Tensor, y: Tensor) -> float:
    """2^D exp(-|x - y|^2 / 2): the expectation of the printed RKS map, whose factor 2^m (m for D there) is spurious."""
    return 2 ** x.shape[-1] * kernel(x, y)


def prf_printed(x: Tensor, y: Tensor) -> float:
    """exp(|x + y|^2 / 2 - |x| - |y|): the expectation of the printed PRF map, divided by its number of features.

    The printed map has no 1/sqrt(number of features) either; without it the inner product grows with their number.
    """
    return math.exp((x + y).square().sum().item() / 2 - (x.norm() + y.norm()).item())


@dataclass(frozen=True)
class Average:
    """A mean of independent draws and its standard error."""

    value: float
    error: float


def simulate(x: Tensor, y: Tensor, *, draws: int, generator: torch.Generator) -> dict[str, Average]:
    """phi(x).phi(y) of the four maps of Lemma S.2 with as many features as `draws`, all from one omega ~ N(0, I).

    Args:
        x, y: (D,), float64.

    Returns:
        The averages by name: rks, rks_printed, prf, prf_printed.
    """
    check_count("draws", draws, 2)
    dim = x.shape[-1]
    norms, lengths = (x.square().sum() + y.square().sum()).item(), (x.norm() + y.norm()).item()
    sums = torch.zeros(4, dtype=torch.float64)
    for count in chunks(draws, dim):
        omega = torch.randn(count, dim, generator=generator, dtype=torch.float64)
        # Features of x and of y separately, as in the lemma.
        u, v = omega @ x, omega @ y
        cosines = u.cos() * v.cos() + u.sin() * v.sin()
        exponentials = u.exp() * v.exp()
        sums += torch.stack([f(values) for values in (cosines, exponentials) for f in (_sum, _sum_of_squares)])
    cosine, cosine_square, exponential, exponential_square = (sums / draws).tolist()
    rks = Average(cosine, math.sqrt(max(cosine_square - cosine**2, 0.0) / (draws - 1)))
    bare = Average(exponential, math.sqrt(max(exponential_square - exponential**2, 0.0) / (draws - 1)))
    return {
        "rks": rks,
        "rks_printed": _scaled(rks, 2.0**dim),
        "prf": _scaled(bare, math.exp(-norms)),
        "prf_printed": _scaled(bare, math.exp(-lengths)),
    }


def _scaled(average: Average, factor: float) -> Average:
    return Average(factor * average.value, factor * average.error)


def _sum(values: Tensor) -> Tensor:
    return values.sum()


def _sum_of_squares(values: Tensor) -> Tensor:
    return values.square().sum()
