"""One measurement of a whole model: the time of training steps, or the peak memory of one, alone in a process."""

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from klformer.lab.bench.measure import GIVE_MEMORY_BACK, in_own_process
from klformer.lab.bench.profile import random_batch
from klformer.lab.data import Batch
from klformer.lab.runs.config import ExperimentConfig, build_model, preset
from klformer.lab.tasks import TASKS
from klformer.memory import extra_peak_memory
from klformer.models import AttentionSpec

#: softmax with the scores written out, as it was at the time of the paper; torch's own computes them in pieces.
MATERIALISED = "softmax-materialised"
WARM_UP_LENGTH = 16


class Seconds(NamedTuple):
    """Of a training step: on the wall, and of the processor, all threads together."""

    wall: float
    processor: float


@dataclass(frozen=True)
class ModelStep:
    """What is measured: the time of so many training steps of a model, or the memory of one if `steps` is 0."""

    task: str
    attention: str
    batch_size: int
    length: int
    steps: int
    device: Literal["cpu", "cuda"]
    preset: str = "paper"
    pooling: Literal["cls", "mean"] | None = None

    def describe(self) -> str:
        return f"{self.task}, {self.attention}, {self.batch_size} x {self.length:,} tokens"


def measure_step(options: ModelStep) -> Seconds | int:
    """Return the median seconds of a training step, or its peak memory in bytes above model, optimiser and inputs.

    A step is forward, backward and AdamW on random inputs of full length. To be called once in a process.
    """
    config = configuration(options)
    torch.manual_seed(config.seed)
    task = TASKS[config.task](config.data)
    model = build_model(config, task).to(options.device)
    objective = task.objective()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(batch: Batch) -> None:
        with sdpa_kernel(SDPBackend.MATH) if options.attention == MATERIALISED else nullcontext():
            loss, count = objective.loss(model, batch)
            torch.autograd.backward(loss / count)
        optimiser.step()
        optimiser.zero_grad()
        if options.device == "cuda":
            torch.cuda.synchronize()

    step(random_batch(task, options.batch_size, length=min(WARM_UP_LENGTH, options.length)).to(options.device))
    batch = random_batch(task, options.batch_size, length=options.length).to(options.device)
    if options.steps == 0:
        return extra_peak_memory(lambda: step(batch), options.device)
    step(batch)
    found = []
    for _ in range(options.steps):
        wall, processor = time.perf_counter(), time.process_time()
        step(batch)
        found.append(Seconds(time.perf_counter() - wall, time.process_time() - processor))
    return Seconds(*(statistics.median(clock) for clock in zip(*found, strict=True)))


def measure_in_own_process(step: ModelStep) -> Seconds | int:
    """Return what `measure_step` finds in a new process. Raises as `in_own_process`."""
    # Giving memory back takes time, which is not to be measured.
    return in_own_process(measure_step, step, environment={} if step.steps else GIVE_MEMORY_BACK)


def configuration(step: ModelStep) -> ExperimentConfig:
    attention = AttentionSpec.parse("softmax" if step.attention == MATERIALISED else step.attention)
    model = {} if step.pooling is None else {"pooling": step.pooling}
    return preset(step.preset, step.task, attention, {"data": {"max_len": step.length}, "model": model})
