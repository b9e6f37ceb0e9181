"""How far estimates of a kernel are from it: Theorem 3, as printed, corrected, and by simulation.

With p = k - q, o = k + q, omega = S n +- mu, n ~ N(0, I) and m noise vectors, the estimates are

    RKS    1/m sum_i cos(n_i.S^T p) cos(mu.p)                 of  exp(-1/2 |S^T p|^2) cos(mu.p)
    PRF    1/m sum_i exp(n_i.S^T o + mu.o - |q|^2 - |k|^2)    of  exp(1/2 |S^T o|^2 + mu.o - |q|^2 - |k|^2)

RKS has the mixture of the paper's experiments, +mu and -mu with one noise, and counts all of its 2 m frequencies in the
mean, so that the kernel is 1 at distance 0; PRF has one component. Both are unbiased, so that the mean squared error is
a variance. As n.x is N(0, |x|^2), Var cos(n.x) = 1/2 (1 - exp(-|x|^2))^2 and Var exp(n.x) = exp(2|x|^2) - exp(|x|^2),
which gives `rks_mse` and `prf_mse`.

The covariance of omega is S S^T; the theorem's "Sigma = S^T S" would go with |S p|.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from klformer.checks import check_count, check_number
from klformer.errors import ArgumentError

FeatureMap = Literal["rks", "prf"]
#: Numbers of noise drawn at a time: 16 MB.
CHUNK = 1 << 21


@dataclass(frozen=True)
class Problem:
    """One pair of vectors and the Gaussian that its kernel is estimated with.

    Args:
        q, k, mean: (D,).
        root: S, (D, D); the covariance is S S^T.
        num_samples: m, noise vectors of one estimate.
    """

    q: Tensor
    k: Tensor
    mean: Tensor
    root: Tensor
    num_samples: int

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples)
        dim = self.q.shape[-1]
        for name, shape in (("q", (dim,)), ("k", (dim,)), ("mean", (dim,)), ("root", (dim, dim))):
            value = getattr(self, name)
            if value.shape != shape or value.dtype != torch.float64:
                raise ArgumentError(f"{name} must be float64 of shape {shape}, got {value.dtype} {tuple(value.shape)}")

    @cached_property
    def norms(self) -> float:
        """|q|^2 + |k|^2."""
        return (self.q.square().sum() + self.k.square().sum()).item()

    @cached_property
    def difference_spread(self) -> float:
        """|S^T p|^2, the variance of omega.p."""
        return (self.root.T @ (self.k - self.q)).square().sum().item()

    @cached_property
    def total_spread(self) -> float:
        """|S^T o|^2, the variance of omega.o."""
        return (self.root.T @ (self.k + self.q)).square().sum().item()

    @cached_property
    def difference_phase(self) -> float:
        """mu.p."""
        return (self.mean @ (self.k - self.q)).item()

    @cached_property
    def total_phase(self) -> float:
        """mu.o."""
        return (self.mean @ (self.k + self.q)).item()

    @cached_property
    def largest_eigenvalue(self) -> float:
        """Of the covariance S S^T."""
        return torch.linalg.matrix_norm(self.root, 2).item() ** 2


def rks_kernel(problem: Problem) -> float:
    """exp(-1/2 |S^T p|^2) cos(mu.p): what the RKS estimate is of (Eq. 4, tied)."""
    return math.exp(-problem.difference_spread / 2) * math.cos(problem.difference_phase)


def prf_kernel(problem: Problem) -> float:
    """exp(1/2 |S^T o|^2 + mu.o - |q|^2 - |k|^2): what the PRF estimate is of (Eq. 9, one component)."""
    return math.exp(problem.total_spread / 2 + problem.total_phase - problem.norms)


def rks_mse_printed(problem: Problem) -> float:
    """(2/m) cos^2(mu.p) (1 - exp(-|S^T p|^2))^2: right if the 2m cosines are divided by m, for a kernel of 2 at 0.

    The last line of the paper's proof has its outer square inside of the bracket.
    """
    spread = -math.expm1(-problem.difference_spread)
    return 2 / problem.num_samples * (math.cos(problem.difference_phase) * spread) ** 2


def rks_mse(problem: Problem) -> float:
    """(1/2m) cos^2(mu.p) (1 - exp(-|S^T p|^2))^2: for the kernel that is 1 at distance 0."""
    return rks_mse_printed(problem) / 4


def prf_mse_printed(problem: Problem) -> float:
    """(1/m) exp(-2(|q|^2 + |k|^2 - mu.o)) (exp(2|S^T o|) - exp(|S^T o|)): without the squares, right for none."""
    return _prf_mse(problem, math.sqrt(problem.total_spread))


def prf_mse(problem: Problem, *, tied: bool = False) -> float:
    """(1/m) exp(-2(|q|^2 + |k|^2 - mu.o)) (exp(2|S^T o|^2) - exp(|S^T o|^2)).

    Args:
        tied: For the pair +-mu with one noise, the default of `gmm-prf`, instead of the theorem's one component:
            exp(mu.o) becomes cosh(mu.o).
    """
    single = _prf_mse(problem, problem.total_spread)
    return single * ((1 + math.exp(-2 * problem.total_phase)) / 2) ** 2 if tied else single


def _prf_mse(problem: Problem, spread: float) -> float:
    factor = math.exp(2 * (problem.total_phase - problem.norms) + spread)
    return factor * math.expm1(spread) / problem.num_samples


def rks_bound_printed(num_samples: int) -> float:
    """2/m."""
    return 2 / num_samples


def rks_bound(num_samples: int) -> float:
    """1/(2m), the least upper bound of `rks_mse`: reached far apart."""
    return 1 / (2 * num_samples)


def prf_bound(problem: Problem) -> float:
    """A bound of `prf_mse` over all q and k: (1/m) exp(|mu|^2 / (1 - 2 lambda)); infinite from lambda = 1/2 on.

    lambda is the largest eigenvalue of S S^T. As |o|^2 <= 2(|q|^2 + |k|^2), the error is at most (1/m) exp(-(1 - 2
    lambda) |o|^2 + 2 mu.o), which has its maximum at o = mu / (1 - 2 lambda). Above 1/2 there is none: take q = k
    along the eigenvector, with mu.q >= 0.
    """
    slack = 1 - 2 * problem.largest_eigenvalue
    if slack <= 0:
        return math.inf
    return math.exp(problem.mean.square().sum().item() / slack) / problem.num_samples


KERNELS: dict[FeatureMap, Callable[[Problem], float]] = {"rks": rks_kernel, "prf": prf_kernel}
PRINTED: dict[FeatureMap, Callable[[Problem], float]] = {"rks": rks_mse_printed, "prf": prf_mse_printed}
CORRECTED: dict[FeatureMap, Callable[[Problem], float]] = {"rks": rks_mse, "prf": prf_mse}


def estimates(problem: Problem, feature_map: FeatureMap, noise: Tensor) -> Tensor:
    """Estimates of the kernel from the frequencies themselves, not from their projected distribution.

    Args:
        noise: (N, m, D).

    Returns:
        (N,).
    """
    centred = noise @ problem.root.T
    if feature_map == "rks":
        difference = problem.k - problem.q
        plus, minus = (centred + problem.mean) @ difference, (centred - problem.mean) @ difference
        return (plus.cos() + minus.cos()).mean(-1) / 2
    return ((centred + problem.mean) @ (problem.k + problem.q) - problem.norms).exp().mean(-1)


@dataclass(frozen=True)
class Simulation:
    """Moments of the error of an estimate, each with its standard error."""

    bias: float
    bias_error: float
    mse: float
    mse_error: float


def simulate(problem: Problem, *, draws: int, generator: torch.Generator) -> dict[FeatureMap, Simulation]:
    """Estimate both kernels `draws` times, from the same noise, and compare with their closed forms.

    The standard error of the mean squared error is from the fourth moment: sqrt((E e^4 - (E e^2)^2) / draws). For PRF
    the moments grow exponentially in |S^T o|^2, the fourth as exp(8 |S^T o|^2): far above |S^T o| = 1 the draws that
    matter do not occur and neither number means anything (see `is_tame`).
    """
    check_count("draws", draws, 2)
    size, dim = problem.num_samples, problem.q.shape[-1]
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in KERNELS}
    for count in chunks(draws, size * dim):
        noise = torch.randn(count, size, dim, generator=generator, dtype=torch.float64)
        for name, kernel in KERNELS.items():
            error = estimates(problem, name, noise) - kernel(problem)
            squared = error.square()
            sums[name] += torch.stack([error.sum(), squared.sum(), squared.square().sum()])
    return {name: _from_moments(total / draws, draws) for name, total in sums.items()}


def _from_moments(moments: Tensor, draws: int) -> Simulation:
    """From the first, second and fourth moment of the error, (3,)."""
    bias, mse, fourth = moments.tolist()
    return Simulation(
        bias=bias,
        bias_error=math.sqrt(max(mse - bias**2, 0.0) / (draws - 1)),
        mse=mse,
        mse_error=math.sqrt(max(fourth - mse**2, 0.0) / (draws - 1)),
    )


def is_tame(problem: Problem, feature_map: FeatureMap) -> bool:
    """Whether a simulation of some ten thousand draws can be trusted: always for RKS, up to |S^T o| = 1 for PRF."""
    return feature_map == "rks" or problem.total_spread <= 1


def standard_errors(value: float, measured: float, error: float) -> float:
    """(measured - value) in standard errors; 0 if they agree to rounding, as where there is nothing random."""
    if math.isclose(value, measured, rel_tol=1e-9, abs_tol=1e-15):
        return 0.0
    return (measured - value) / error if error else math.inf


class Point(NamedTuple):
    """Where a grid has a problem: the scale of S, |q - k|, |q + k| and m."""

    scale: float
    difference: float
    total: float
    num_samples: int


@dataclass(frozen=True)
class Grid:
    """Problems with one set of directions: S = scale S_0, p and o of given lengths, mu fixed.

    S_0 is random and not symmetric, with eigenvalues of S_0 S_0^T that are 1 on average: those of the covariance are
    scale^2 on average. The seed is of this geometry; the default is one where unit vectors p and o have S_0^T p and
    S_0^T o of about unit length, so that scale 1 is neither flat nor wild.
    """

    scales: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0, 2.0)
    differences: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    totals: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    num_samples: tuple[int, ...] = (4, 16, 64)
    dim: int = 4
    mean_norm: float = 0.5
    seed: int = 875

    def __post_init__(self) -> None:
        check_count("dim", self.dim)
        for name in ("scales", "differences", "totals"):
            for value in getattr(self, name):
                check_number(name, value)

    def __len__(self) -> int:
        return len(self.scales) * len(self.differences) * len(self.totals) * len(self.num_samples)

    def points(self) -> Iterator[Point]:
        """Every point, scales slowest."""
        for point in product(self.scales, self.differences, self.totals, self.num_samples):
            yield Point(*point)

    def problem(self, point: Point) -> Problem:
        """The problem at a point of the grid, or between them."""
        generator = torch.Generator().manual_seed(self.seed)
        directions = torch.randn(3, self.dim, generator=generator, dtype=torch.float64)
        p, o, mean = directions / directions.norm(dim=-1, keepdim=True)
        root = torch.randn(self.dim, self.dim, generator=generator, dtype=torch.float64)
        return Problem(
            q=(point.total * o - point.difference * p) / 2,
            k=(point.total * o + point.difference * p) / 2,
            mean=self.mean_norm * mean,
            root=point.scale * self.dim**0.5 / root.norm() * root,
            num_samples=point.num_samples,
        )


def chunks(draws: int, numbers_a_draw: int) -> Iterator[int]:
    """Sizes of the parts that `draws` are made in."""
    size = max(1, CHUNK // numbers_a_draw)
    for start in range(0, draws, size):
        yield min(size, draws - start)
