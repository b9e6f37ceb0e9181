"""`klformer profile`: memory of one training step of a preset's model, and how much of its time is attention."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from klformer.bench.measure import MEBIBYTE, extra_peak_memory
from klformer.experiments.build import build_model
from klformer.experiments.config import ExperimentConfig
from klformer.tasks import TASKS, Batch, Examples, Sequences, Task, collate
from klformer.training.evaluation import class_scores

#: Operators that are attention itself, without its projections.
ATTENTION_OPERATORS = (
    "klformer::spectral_product",
    "klformer::spectral_product_backward",
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

    def describe(self) -> str:
        share = 100 * self.attention_seconds / self.seconds
        return (
            f"{self.batch_size} x {self.length:,} tokens: a step took {self.seconds:.2f} s, "
            f"{share:.0f}% of it in the attention product; "
            f"peak memory {self.peak_bytes / MEBIBYTE:,.0f} MiB above the model"
        )


def profile_step(config: ExperimentConfig, *, batch_size: int) -> StepProfile:
    """Forward, backward and optimiser step on random full-length inputs; to be called once in a process of its own."""
    torch.manual_seed(config.seed)
    task = TASKS[config.task](config.data)
    model = build_model(config, task)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(batch: Batch) -> None:
        loss = torch.nn.functional.cross_entropy(class_scores(model, batch), batch.labels)
        torch.autograd.backward(loss)
        optimiser.step()
        optimiser.zero_grad()

    step(_random_batch(task, batch_size, length=16))
    batch = _random_batch(task, batch_size, length=task.max_len)
    peak = extra_peak_memory(lambda: step(batch))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(batch)
    averages = profiler.key_averages()
    attention = sum(event.cpu_time_total for event in averages if event.key in ATTENTION_OPERATORS)
    total = sum(event.self_cpu_time_total for event in averages)
    return StepProfile(batch_size, task.max_len, total / 1e6, attention / 1e6, peak)


def _random_batch(task: Task, batch_size: int, length: int) -> Batch:
    """Random inputs of one length, in the form of the task."""
    generator = np.random.default_rng(0)
    shape = (batch_size, length) if task.vocab_size is not None else (batch_size, length, task.input_dim or 1)
    high = task.vocab_size or 2

    def sequences() -> Sequences:
        return Sequences.from_matrix(generator.integers(0, high, shape))

    labels = generator.integers(0, task.num_classes, batch_size)
    examples = Examples(sequences(), labels, sequences() if task.is_pair else None)
    return collate(examples, np.arange(batch_size))
