"""What a run of the task `planted` has found: its kernel before and after training, and at moments in between."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from klformer.attention.kernelized import KernelizedAttention
from klformer.lab.analysis.kernel.figures import draw_learning, draw_planted
from klformer.lab.analysis.kernel.measure import over_draws
from klformer.lab.analysis.output import print_table, write_results
from klformer.lab.runs.config import build_model
from klformer.lab.runs.load import LoadedRun
from klformer.lab.tasks import Planted
from klformer.lab.tasks.planted import split_inputs
from klformer.lab.training.checkpoint import Checkpoint, put_weights
from klformer.lab.training.progress import SilentReporter

#: Held-out queries, and as many keys.
_POINTS = 400


@dataclass(frozen=True)
class PlantedError:
    """How far a kernel is from the planted one."""

    of_mean: float
    mean: float
    deviation: float


def held_out_pairs(task: Planted) -> tuple[Tensor, Tensor]:
    """Return queries and keys of the test set, (n, D) each."""
    examples = task.load("test")
    q, k, _ = split_inputs(torch.from_numpy(examples.first.values).double())
    return q[:_POINTS], k[:_POINTS]


@torch.no_grad()
def planted_error(
    attention: KernelizedAttention, task: Planted, q: Tensor, k: Tensor, *, draws: int, seed: int
) -> PlantedError:
    """Return the error of a kernel of one head on all pairs of q (L, D) and k (S, D)."""
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
    """Return mean and deviation (n,) over draws of the kernel of keys that are `delta` (n,) away from a query along the
    first axis, with the factor that fits the planted kernel best on the pairs of q and k."""
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


PLANTED_CAPTION = (
    "The planted kernel and the model's, before and after training, with the factor that fits best on held-out pairs. "
    "Band: deviation of one draw; error: relative L2, of the mean over draws."
)
LEARNING_CAPTION = (
    "The kernel at the start, and at checkpoints of the run. Gray: the planted kernel. Band: deviation of one draw. "
    "Error: relative L2, of the mean over draws."
)
PROFILES_CAPTION = (
    "Kernels at distances from key to query along the first axis, with the factor that fits best on held-out pairs: "
    "mean over draws, and deviation of one draw."
)
#: Panels of the figure of moments.
MOMENTS = 6
#: Distances from key to query, of random numbers the same for all kernels.
SPAN, SEED = 4.0, 3


def compare_with_planted(
    loaded: LoadedRun,
    task: Planted,
    before: KernelizedAttention,
    after: KernelizedAttention,
    *,
    folder: Path,
    draws: int,
) -> None:
    """Write the error of the kernel before and after training, with a figure and its curves, and print it."""
    q, k = held_out_pairs(task)
    rows, curves = [], []
    for name, kernel in (("initial", before), ("trained", after)):
        error = planted_error(kernel, task, q, k, draws=draws, seed=SEED)
        known: dict[str, Any] = {"kernel": name}
        rows.append(known | {"error_of_mean": error.of_mean, "error": error.mean, "error_deviation": error.deviation})
        curves += [known | point for point in _curve(kernel, task, q, k, draws=draws)]
    name = loaded.folder.name
    settings = {"run": name, "draws": draws, "pairs": len(q) * len(k), "kernel": task.config.kernel}
    figure = draw_planted(rows, curves)
    write_results(folder, "kernel-planted", caption=PLANTED_CAPTION, rows=rows, settings=settings, figure=figure)
    write_results(folder, "kernel-planted-profiles", caption=PROFILES_CAPTION, rows=curves, settings=settings)
    console = Console()
    print_table(console, rows, f"{name}: relative L2 error on {len(q) * len(k):,} held-out pairs")
    console.print(f"kernel-planted and kernel-planted-profiles written to {folder}", highlight=False)


def compare_moments(loaded: LoadedRun, task: Planted, before: KernelizedAttention, *, folder: Path, draws: int) -> None:
    """Write the kernel at the start and at the checkpoints of the run, with a figure of small multiples and its curves.

    A run keeps as many checkpoints as `--training.keep-checkpoints` says.
    """
    checkpoints = loaded.run.checkpoints(SilentReporter().say).whole("step")
    moments = [(0, before)]
    for checkpoint in _spread(checkpoints, MOMENTS - 1):
        model = build_model(loaded.config, task)
        put_weights(model, checkpoint.weights(), checkpoint.folder)
        moments.append((checkpoint.step, _kernel_of(model)))
    q, k = held_out_pairs(task)
    rows, curves = [], []
    for step, kernel in moments:
        error = planted_error(kernel, task, q, k, draws=draws, seed=SEED)
        rows.append({"step": step, "error_of_mean": error.of_mean, "error": error.mean})
        curves += [{"step": step} | point for point in _curve(kernel, task, q, k, draws=draws)]
    settings = {"run": loaded.folder.name, "draws": draws, "kernel": task.config.kernel}
    figure = draw_learning(rows, curves)
    write_results(folder, "kernel-learning", caption=LEARNING_CAPTION, rows=rows, settings=settings, figure=figure)
    write_results(folder, "kernel-learning-profiles", caption=PROFILES_CAPTION, rows=curves, settings=settings)
    written = f"kernel-learning and kernel-learning-profiles, at {len(moments)} moments, written to {folder}"
    Console().print(written, highlight=False)


def _curve(kernel: KernelizedAttention, task: Planted, q: Tensor, k: Tensor, *, draws: int) -> list[dict[str, float]]:
    """Return the planted kernel and a model's at all distances, one row each."""
    delta = torch.linspace(-SPAN, SPAN, 121, dtype=torch.float64)
    mean, deviation = profiles(kernel, task, q, k, delta, draws=draws, seed=SEED)
    columns = {"delta": delta, "planted": _planted(task, delta), "mean": mean, "deviation": deviation}
    points = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, point, strict=True)) for point in points]


def _spread(checkpoints: Sequence[Checkpoint], count: int) -> list[Checkpoint]:
    """Choose at most so many, the newest among them, closer together at the beginning, where most is learned."""
    if len(checkpoints) <= count:
        return list(checkpoints)
    ratio = (len(checkpoints)) ** (1 / (count - 1))
    wanted: list[int] = []
    for number in range(count):
        place = max(round(ratio**number) - 1, wanted[-1] + 1 if wanted else 0)
        wanted.append(min(place, len(checkpoints) - count + number))
    return [checkpoints[place] for place in wanted]


def _kernel_of(model: torch.nn.Module) -> KernelizedAttention:
    return next(module for module in model.modules() if isinstance(module, KernelizedAttention)).double()


def _planted(task: Planted, delta: Tensor) -> Tensor:
    """Return the planted kernel of keys that are `delta` (n,) away from a query along the first axis."""
    origin = torch.zeros(1, task.config.dim, dtype=torch.float64)
    along = origin + delta.unsqueeze(-1) * torch.eye(task.config.dim, dtype=torch.float64)[0]
    return task.kernel(origin, along)[0]
