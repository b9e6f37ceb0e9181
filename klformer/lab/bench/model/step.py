"""One measurement of a whole model: the time of training steps, or the peak memory of one, alone in a process."""

import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from klformer.lab.bench import measure
from klformer.lab.bench.measure import GIVE_MEMORY_BACK, as_flags
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
    """Print the time of training steps of one model, or the memory of one; `model` calls this in a new process."""

    task: str
    """Task of the paper's tables."""
    attention: str
    """Attention, with options after a colon."""
    batch_size: int
    """Examples in a step."""
    length: int
    """Tokens in a sequence."""
    steps: int
    """Steps that are timed; 0 to measure the memory of one instead."""
    device: Literal["cpu", "cuda"]
    """Where to compute."""
    preset: str = "paper"
    """Preset of the model."""
    pooling: Literal["cls", "mean"] | None = None
    """What the classifier sees, if not as in the preset."""

    def describe(self) -> str:
        return f"{self.task}, {self.attention}, {self.batch_size} x {self.length:,} tokens"


def print_step(options: ModelStep) -> None:
    """Print what `measure_step` finds; meant to be alone in its process."""
    print(json.dumps(measure_step(options)))


def measure_step(options: ModelStep) -> Seconds | int:
    """Median seconds of a training step, or its peak memory in bytes above model, optimiser and inputs.

    A step is forward, backward and AdamW on random inputs of full length. To be called once in a process.
    """
    config = configuration(options)
    torch.manual_seed(config.seed)
    task = TASKS[config.task](config.data)
    model = build_model(config, task).to(options.device)
    objective = task.objective()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(batch: Batch) -> None:
        with _scores_written_out() if options.attention == MATERIALISED else nullcontext():
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


def in_own_process(step: ModelStep) -> Seconds | int:
    """What `measure_step` finds in a new process.

    Raises:
        RuntimeError: with the end of its error output, if it fails: most often there is not enough memory.
    """
    # Giving memory back takes time, which is not to be measured.
    environment = {} if step.steps else GIVE_MEMORY_BACK
    given = {name: value for name, value in asdict(step).items() if value is not None}
    found = json.loads(measure.in_own_process(["model-step", *as_flags(given)], environment=environment))
    return Seconds(*found) if step.steps else int(found)


def configuration(step: ModelStep) -> ExperimentConfig:
    attention = AttentionSpec.parse("softmax" if step.attention == MATERIALISED else step.attention)
    config = preset(step.preset, step.task, attention)
    changed: dict[str, object] = {"data": config.data.model_copy(update={"max_len": step.length})}
    if step.pooling is not None:
        changed["model"] = config.model.model_copy(update={"pooling": step.pooling})
    return config.model_copy(update=changed)


def _scores_written_out() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH)
