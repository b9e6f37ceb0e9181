"""A training step of a preset's model, on random inputs: memory, the share of attention, the cost of padding."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from klformer.lab.data import Batch, BucketSampler, Examples, Sequences, collate
from klformer.lab.runs.config import ExperimentConfig, build_model
from klformer.lab.tasks import TASKS, build_task
from klformer.lab.tasks.base import Task
from klformer.lab.training.objective import Objective
from klformer.memory import MEBIBYTE, extra_peak_memory
from klformer.ops.spectral_product import record_backends


def random_batch(task: Task, batch_size: int, length: int) -> Batch:
    """Return random inputs of one length, in the form of the task."""
    generator = np.random.default_rng(0)
    form = task.shape()
    size = (batch_size, length) if form.vocab_size is not None else (batch_size, length, form.input_dim or 1)
    high = form.vocab_size or 2

    def sequences() -> Sequences:
        return Sequences.from_matrix(generator.integers(0, high, size))

    objective = task.objective()
    # Any target takes as long as any other.
    targets = torch.zeros(batch_size, *objective.prediction_shape, dtype=objective.prediction_dtype).numpy()
    examples = Examples(sequences(), targets, sequences() if form.is_pair else None)
    return collate(examples, np.arange(batch_size))


#: Operators that are attention itself, without its projections.
ATTENTION_OPERATORS = (
    "SpectralProduct",
    "SpectralProductBackward",
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)


@dataclass(frozen=True)
class StepProfile:
    """What a training step takes."""

    batch_size: int
    length: int
    seconds: float
    attention_seconds: float
    peak_bytes: int
    backends: tuple[str, ...] = ()
    """Who served the products of kernels."""

    def describe(self) -> str:
        return (
            f"{self.batch_size} x {self.length:,} tokens: a step took {self.seconds:.2f} s, "
            f"{self.attention_seconds / self.seconds:.0%} of it in the attention product"
            f"{''.join(f' ({name})' for name in self.backends)}; "
            f"peak memory {self.peak_bytes / MEBIBYTE:,.0f} MiB above the model"
        )


def profile_step(config: ExperimentConfig, *, batch_size: int) -> StepProfile:
    """Profile forward, backward and optimiser step on random full-length inputs; to be called once in a process."""
    torch.manual_seed(config.seed)
    task = TASKS[config.task](config.data)
    model = build_model(config, task)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(batch: Batch) -> None:
        _backward(task.objective(), model, batch)
        optimiser.step()
        optimiser.zero_grad()

    step(random_batch(task, batch_size, length=16))
    batch = random_batch(task, batch_size, length=task.max_len)
    peak = extra_peak_memory(lambda: step(batch))
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_backends() as served:
        step(batch)
    averages = profiler.key_averages()
    attention = sum(event.cpu_time_total for event in averages if event.key in ATTENTION_OPERATORS)
    total = sum(event.self_cpu_time_total for event in averages)
    backends = tuple(sorted({name for _, name in served}))
    return StepProfile(batch_size, task.max_len, total / 1e6, attention / 1e6, peak, backends)


@dataclass(frozen=True)
class PaddingProfile:
    """The same batches of training, padded to their own longest sequence and to the longest of all."""

    num_batches: int
    tokens_ratio: float
    time_ratio: float
    #: Median over the batches, which a slow moment of the machine does not move.
    median_time_ratio: float
    largest_difference: float

    def describe(self) -> str:
        return (
            f"{self.num_batches} batches padded to the longest sequence of all instead of their own: "
            f"{self.tokens_ratio:.2f}x the tokens, {self.time_ratio:.2f}x the time (median of the batches "
            f"{self.median_time_ratio:.2f}x), losses that differ by {self.largest_difference:.1g} at most"
        )


def profile_padding(config: ExperimentConfig, *, num_batches: int) -> PaddingProfile:
    """Time forward and backward of the first batches of an epoch in both ways, in turns."""
    torch.manual_seed(config.seed)
    task = build_task(config.task, config.data)
    task.prepare()
    train = task.load("train")
    model = build_model(config, task).eval()  # without dropout, so that the losses can be compared
    sampler = BucketSampler(train.lengths, batch_size=config.training.batch_size, seed=config.seed)
    longest = int(train.lengths.max())
    _backward(task.objective(), model, random_batch(task, 2, length=16))
    tokens, seconds, differences = [], [], []
    for indices in sampler.batches(0)[:num_batches]:
        batches = [collate(train, indices), collate(train, indices, pad_to=longest)]
        tokens.append([batch.num_padded for batch in batches])
        losses, times = [], []
        for batch in batches:
            start = time.perf_counter()
            losses.append(_backward(task.objective(), model, batch))
            times.append(time.perf_counter() - start)
        seconds.append(times)
        differences.append(abs(losses[0] - losses[1]))
    (own_tokens, all_tokens), (own_time, all_time) = np.sum(tokens, axis=0), np.sum(seconds, axis=0)
    median = float(np.median([after / before for before, after in seconds]))
    return PaddingProfile(len(seconds), all_tokens / own_tokens, all_time / own_time, median, max(differences))


def _backward(objective: Objective, model: nn.Module, batch: Batch) -> float:
    """Go forward and backward on a batch; return its loss."""
    total, count = objective.loss(model, batch)
    loss = total / count
    torch.autograd.backward(loss)
    return loss.item()
