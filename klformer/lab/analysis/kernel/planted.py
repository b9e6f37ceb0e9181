"""A learned kernel beside the one that was planted: the error on pairs that training has not seen.

A factor of the kernel cancels in attention. Kernels are therefore compared up to one:

    error = min_c |c K - K*| / |K*|

over all pairs of held-out queries and keys. The error of the mean over draws is the bias of what was learned; the mean
of the errors of single draws has the noise of the frequencies in it as well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.attention.kernelized import KernelizedAttention
from klformer.lab.analysis.kernel.measure import over_draws
from klformer.lab.tasks import Planted
from klformer.lab.tasks.planted import split_inputs

#: Held-out queries, and as many keys.
_POINTS = 400


@dataclass(frozen=True)
class PlantedError:
    """How far a kernel is from the planted one."""

    of_mean: float
    mean: float
    deviation: float


def held_out_pairs(task: Planted) -> tuple[Tensor, Tensor]:
    """Queries and keys of the test set, (n, D) each."""
    examples = task.load("test")
    q, k, _ = split_inputs(torch.from_numpy(examples.first.values).double())
    return q[:_POINTS], k[:_POINTS]


@torch.no_grad()
def planted_error(
    attention: KernelizedAttention, task: Planted, q: Tensor, k: Tensor, *, draws: int, seed: int
) -> PlantedError:
    """The error of a kernel of one head on all pairs of q (L, D) and k (S, D)."""
    planted = task.kernel(q, k)
    queries, keys = q[None, None], k[None, None]
    estimates = [attention.kernel.estimate(queries, keys)[0, 0] for _ in over_draws(attention, draws, seed)]
    errors = torch.stack([_relative_error(estimate, planted) for estimate in estimates])
    return PlantedError(
        of_mean=_relative_error(torch.stack(estimates).mean(0), planted).item(),
        mean=errors.mean().item(),
        deviation=errors.std().item() if draws > 1 else 0.0,
    )


@torch.no_grad()
def profiles(
    attention: KernelizedAttention, task: Planted, q: Tensor, k: Tensor, delta: Tensor, *, draws: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Mean and deviation (n,) over draws of the kernel of keys that are `delta` (n,) away from a query along the first
    axis, with the factor that fits the planted kernel best on the pairs of q and k."""
    planted = task.kernel(q, k)
    query = torch.zeros(1, q.shape[-1], dtype=q.dtype)
    keys = query + delta.unsqueeze(-1) * torch.eye(q.shape[-1], dtype=q.dtype)[0]
    fitted = []
    for _ in over_draws(attention, draws, seed):
        factor = _factor(attention.kernel.estimate(q[None, None], k[None, None])[0, 0], planted)
        fitted.append(factor * attention.kernel.estimate(query[None, None], keys[None, None])[0, 0, 0])
    stacked = torch.stack(fitted)
    return stacked.mean(0), stacked.std(0) if draws > 1 else torch.zeros_like(stacked[0])


def _factor(estimate: Tensor, planted: Tensor) -> Tensor:
    return (estimate * planted).sum() / estimate.square().sum()


def _relative_error(estimate: Tensor, planted: Tensor) -> Tensor:
    return (_factor(estimate, planted) * estimate - planted).norm() / planted.norm()
