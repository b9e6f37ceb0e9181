"""One update of the weights with one batch, in parts, by one process or several; and the clock of checkpoints."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from klformer.lab.data import Examples, collate
from klformer.lab.data.sequences import IntArray
from klformer.lab.training.config import TrainingConfig
from klformer.lab.training.objective import Objective
from klformer.lab.training.processes import Layout, make_layout
from klformer.lab.training.sharding import whole
from klformer.lab.training.signals import StopSignal

#: Between two checkpoints so many times as much time passes as one takes.
REST = 20


class CheckpointClock:
    """Runs from the beginning of training, and again from every checkpoint.

    Args:
        seconds: The age of the last checkpoint at which another is due; never if None.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._cost = 0.0
        self.start()

    def start(self) -> None:
        """Start again: nothing is lost yet."""
        self._since = time.monotonic()

    def is_due(self) -> bool:
        """Return whether the last checkpoint is old enough."""
        if self._seconds is None:
            return False
        return time.monotonic() - self._since >= max(self._seconds, REST * self._cost)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time the writing of a checkpoint."""
        self.start()
        yield
        self._cost = time.monotonic() - self._since
        self.start()


class NotFinite(Exception):  # noqa: N818 - the trainer makes an error of it that names the step
    """What is not finite."""


@dataclass(frozen=True)
class StepResult:
    """Sums of one step over all parts and processes."""

    loss: float
    count: int
    metrics: dict[str, float]
    tokens: int
    stop: bool
    save: bool


class Stepper:
    """Does steps."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: Any,
        examples: Examples,
        *,
        objective: Objective,
        training: TrainingConfig,
        accelerator: Accelerator,
        layout: Layout | None = None,
        signal: StopSignal,
        clock: CheckpointClock,
    ) -> None:
        self.model = model
        self.optimiser = optimiser
        self.examples = examples
        self.objective = objective
        self.training = training
        self.accelerator = accelerator
        self.layout = make_layout(accelerator) if layout is None else layout
        self.signal = signal
        self.clock = clock
        self._pad_to = int(examples.lengths.max()) if training.pad_to_longest else None

    def step(self, indices: IntArray, draw: Sequence[int]) -> StepResult:
        """Go forward and backward through this process's parts of a batch of all processes, and update once.

        Args:
            indices: The examples of the batch.
            draw: Numbers from which the objective draws whatever is random.

        Raises:
            NotFinite: the loss, or the norm of the gradient.
        """
        accelerator, objective = self.accelerator, self.objective
        names = [metric.name for metric in objective.metrics]
        # This process's [loss, count, tokens, signal, save, metrics ...]; NaN for metrics that are no means.
        sums = torch.zeros(5 + len(names), dtype=torch.float64, device=accelerator.device)
        share, of_share = self._share(indices)
        # Outputs of whole sequences are the same for all that share them, and count once.
        weight = of_share if objective.of_positions else of_share / self.layout.num_parts
        parts = [part for part in np.array_split(share, self.training.accumulation) if len(part)]
        for number, part in enumerate(parts):
            posed = objective.pose(collate(self.examples, part, pad_to=self._pad_to).to(accelerator.device), draw)
            batch, _ = self.layout.part(posed, of_positions=objective.of_positions)
            is_last = number == len(parts) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    outputs = objective.outputs(self.model, batch)
                outputs = outputs.float()
                loss = weight * objective.loss_of(outputs, batch)
                # Processes average their gradients, so that each counts its sum as a share of the global mean.
                accelerator.backward(loss * (accelerator.num_processes / len(indices)))
            sums[0] += loss.detach()
            sums[1] += weight * objective.count(outputs, batch)
            sums[2] += of_share * batch.num_tokens
            shown = objective.sums(outputs, batch)
            for place, name in enumerate(names, start=5):
                sums[place] += weight * shown[name] if name in shown else math.nan
        # They go with the sums, so that all processes know of a signal that one got, and save together.
        sums[3] = float(self.signal.number)
        sums[4] = float(self.clock.is_due())
        return self._update(accelerator.reduce(sums, "sum").tolist(), len(indices))

    def _update(self, sums: Sequence[float], num_examples: int) -> StepResult:
        """Update the weights with the gradients, unless they or the loss are not finite."""
        loss, count, tokens, stop, save, *metrics = sums
        if not math.isfinite(loss):
            raise NotFinite(f"loss is {loss}")
        self._weigh_gradients(num_examples / count if count else 0.0)
        # Also without clipping: a gradient that is not finite must not reach the weights.
        limit = math.inf if self.training.clip_norm is None else self.training.clip_norm
        norm = float(whole(self.accelerator.clip_grad_norm_(self.model.parameters(), limit)))
        # The scaler of fp16 skips such steps itself, and lowers its scale.
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise NotFinite(f"norm of the gradient is {norm}")
        self.optimiser.step()
        self.optimiser.zero_grad()
        names = [metric.name for metric in self.objective.metrics]
        known = {name: value for name, value in zip(names, metrics, strict=True) if not math.isnan(value)}
        return StepResult(loss, round(count), known, int(tokens), bool(stop), bool(save))

    def _weigh_gradients(self, factor: float) -> None:
        """Correct gradients that were taken for a mean over examples, whose number is known beforehand, where the loss
        counts something else."""
        if factor != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _share(self, indices: IntArray) -> tuple[IntArray, float]:
        """Return this process's part of a batch, and what it counts.

        Gradients are averaged over all processes, which all have to take part: where there are fewer examples than
        processes, those without one work through another's and count nothing.
        """
        share = self.layout.share(indices)
        return (share, 1.0) if len(share) else (indices[:1], 0.0)
