"""The figures of a run of the task `planted`: its kernel before and after training, and at moments in between."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from rich.console import Console
from torch import Tensor

from klformer.analysis.kernel.planted import held_out_pairs, planted_error, profiles
from klformer.analysis.output import print_table, write_results
from klformer.attention.kernelized import KernelizedAttention
from klformer.plotting import FROZEN, LEARNED, TRUTH, WIDE
from klformer.runs.build import build_model
from klformer.runs.load import LoadedRun
from klformer.tasks import Planted
from klformer.training.checkpoint import Checkpoint, put_weights
from klformer.training.progress import SilentReporter

PLANTED_CAPTION = (
    "The planted kernel and the model's, before and after training, with the factor that fits best on held-out pairs. "
    "Band: deviation of one draw; error: relative L2, of the mean over draws."
)
LEARNING_CAPTION = (
    "The kernel at the start, and at checkpoints of the run. Gray: the planted kernel. Band: deviation of one draw. "
    "Error: relative L2, of the mean over draws."
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
    """Write the error of the kernel before and after training, with a figure, and print it."""
    q, k = held_out_pairs(task)
    kernels = {"initial": before, "trained": after}
    errors = {name: planted_error(kernel, task, q, k, draws=draws, seed=SEED) for name, kernel in kernels.items()}
    rows = [
        {"kernel": name, "error_of_mean": error.of_mean, "error": error.mean, "error_deviation": error.deviation}
        for name, error in errors.items()
    ]
    delta = _distances()
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(delta, _planted(task, delta), color=TRUTH, linewidth=2, label=f"planted: {task.config.kernel}")
    for (name, kernel), colour in zip(kernels.items(), (FROZEN, LEARNED), strict=True):
        mean, deviation = profiles(kernel, task, q, k, delta, draws=draws, seed=SEED)
        axes.plot(delta, mean, color=colour, linestyle="--", label=f"{name}, error {errors[name].of_mean:.2g}")
        axes.fill_between(delta, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("key - query, along the first axis")
    axes.grid()
    axes.legend()
    name = loaded.folder.name
    settings = {"run": name, "draws": draws, "pairs": len(q) * len(k), "kernel": task.config.kernel}
    write_results(folder, "kernel-planted", caption=PLANTED_CAPTION, rows=rows, settings=settings, figure=figure)
    console = Console()
    print_table(console, rows, f"{name}: relative L2 error on {len(q) * len(k):,} held-out pairs")
    console.print(f"kernel-planted written to {folder}", highlight=False)


def draw_learning(
    loaded: LoadedRun, task: Planted, before: KernelizedAttention, *, folder: Path, draws: int
) -> list[Path]:
    """Write the kernel at the start and at the checkpoints of the run, as small multiples.

    A run keeps as many checkpoints as `--training.keep-checkpoints` says.
    """
    checkpoints = loaded.run.checkpoints(SilentReporter().say).whole("step")
    moments = [(0, before)]
    for checkpoint in _spread(checkpoints, MOMENTS - 1):
        model = build_model(loaded.config, task)
        put_weights(model, checkpoint.weights(), checkpoint.folder)
        moments.append((checkpoint.step, _kernel_of(model)))
    q, k = held_out_pairs(task)
    delta, columns = _distances(), min(3, len(moments))
    rows_of_panels = math.ceil(len(moments) / columns)
    figure, grid = plt.subplots(
        rows_of_panels,
        columns,
        figsize=(WIDE, 0.7 + 1.9 * rows_of_panels),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    rows = []
    for axes, (step, kernel) in zip(grid.flat, moments, strict=False):
        error = planted_error(kernel, task, q, k, draws=draws, seed=SEED)
        mean, deviation = profiles(kernel, task, q, k, delta, draws=draws, seed=SEED)
        axes.plot(delta, _planted(task, delta), color="#999999", linewidth=4, solid_capstyle="butt")
        axes.plot(delta, mean, color=LEARNED if step else FROZEN)
        axes.fill_between(delta, mean - deviation, mean + deviation, color=LEARNED, alpha=0.15, linewidth=0)
        axes.set_title(f"{f'step {step:,}' if step else 'before'}: error {error.of_mean:.2g}")
        axes.grid()
        rows.append({"step": step, "error_of_mean": error.of_mean, "error": error.mean})
    for axes in grid.flat[len(moments) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("key - query")
    for axes in grid[:, 0]:
        axes.set_ylabel("kernel")
    settings = {"run": loaded.folder.name, "draws": draws, "kernel": task.config.kernel}
    written = write_results(
        folder, "kernel-learning", caption=LEARNING_CAPTION, rows=rows, settings=settings, figure=figure
    )
    Console().print(f"kernel-learning, at {len(moments)} moments, written to {folder}", highlight=False)
    return written


def _spread(checkpoints: Sequence[Checkpoint], count: int) -> list[Checkpoint]:
    """At most so many, the newest among them, the earlier the closer: most is learned at the beginning."""
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


def _distances() -> Tensor:
    return torch.linspace(-SPAN, SPAN, 121, dtype=torch.float64)


def _planted(task: Planted, delta: Tensor) -> Tensor:
    """The planted kernel of keys that are `delta` (n,) away from a query along the first axis."""
    origin = torch.zeros(1, task.config.dim, dtype=torch.float64)
    along = origin + delta.unsqueeze(-1) * torch.eye(task.config.dim, dtype=torch.float64)[0]
    return task.kernel(origin, along)[0]
