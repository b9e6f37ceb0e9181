"""The one training loop, on accelerate: any task, any model, one process or many.

Everything random is a function of (seed, step, rank), and the order of the data of (seed, epoch). A checkpoint
therefore needs the weights, the optimiser and the step, and a resumed run is the uninterrupted one, bit for bit.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from klformer.kernels import resample
from klformer.tasks import BucketSampler, Examples, collate
from klformer.training.checkpoint import (
    MILESTONES,
    OPTIMISER,
    WEIGHTS,
    Checkpoint,
    CheckpointStore,
    load_optimiser_tensors,
    milestone,
    optimiser_tensors,
)
from klformer.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig
from klformer.training.errors import Interrupted, TrainingError
from klformer.training.evaluation import Evaluation, class_scores, evaluate
from klformer.training.log import MetricsLog
from klformer.training.progress import Reporter
from klformer.training.schedules import learning_rate
from klformer.training.seeds import derived_seed, generator_for


@dataclass
class Progress:
    """Where training is; saved with every checkpoint."""

    step: int = 0
    best_accuracy: float = -1.0
    best_loss: float = 1e30
    best_step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    first_reached: dict[str, int] = field(default_factory=dict)


@dataclass
class StepTotals:
    """Sums over the steps since the last line of the log, over all processes."""

    loss: float = 0.0
    correct: float = 0.0
    examples: int = 0
    tokens: int = 0
    since: float = field(default_factory=time.monotonic)


class Trainer:
    """Trains a classifier.

    Args:
        model: Takes a batch's inputs and masks, gives class scores.
        train: Training examples.
        validation: Examples to select on.
        num_classes: Number of classes.
        folder: The run's folder.
        accelerator: Device, processes and precision.
        reporter: Told what happens.
        seed: Of everything random.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Examples,
        validation: Examples,
        *,
        num_classes: int,
        optimiser: OptimiserConfig,
        schedule: ScheduleConfig,
        training: TrainingConfig,
        folder: Path,
        accelerator: Accelerator,
        reporter: Reporter,
        seed: int,
    ) -> None:
        self.training = training
        self.schedule = schedule
        self.base_rate = optimiser.learning_rate
        self.folder = folder
        self.accelerator = accelerator
        self.reporter = reporter
        self.seed = seed
        self.num_classes = num_classes
        self.train_examples, self.validation_examples = train, validation
        self.sampler = BucketSampler(
            train.lengths,
            batch_size=training.batch_size,
            seed=seed,
            drop_last=len(train) % training.batch_size < accelerator.num_processes,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
        )
        self.total_steps = self._total_steps()
        self.model = model.to(accelerator.device)
        adamw = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=optimiser.learning_rate,
            betas=(optimiser.beta1, optimiser.beta2),
            eps=optimiser.eps,
            weight_decay=optimiser.weight_decay,
        )
        self.wrapped, self.optimiser = accelerator.prepare(self.model, adamw)
        self.store = CheckpointStore(folder / "checkpoints", reporter.say)
        self.progress = Progress()
        self._stop_signal = 0

    def _total_steps(self) -> int:
        by_epochs = math.inf if self.training.max_epochs is None else self.training.max_epochs * len(self.sampler)
        by_steps = math.inf if self.training.max_steps is None else self.training.max_steps
        return int(min(by_epochs, by_steps))

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint; False if there is none."""
        checkpoint = self.store.newest("step")
        if checkpoint is None:
            return False
        self._load_weights(checkpoint)
        load_optimiser_tensors(self.model, self._plain_optimiser(), checkpoint.optimiser())
        self.progress = Progress(**checkpoint.info["progress"])
        return True

    def run(self) -> None:
        """Train to the end.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the state is saved.
            TrainingError: the loss is not finite any more, or a checkpoint can't be written.
        """
        log = MetricsLog(self.folder, self.progress.step) if self.accelerator.is_main_process else None
        self.reporter.start(self.progress.step, self.total_steps)
        try:
            with self._watching_signals():
                self._loop(log)
        finally:
            self.reporter.finish()
            if log is not None:
                log.close()

    def load_best(self) -> None:
        """Put the weights with the best validation accuracy into the model."""
        best = self.store.newest("best")
        if best is None:
            raise TrainingError(f"there is no whole checkpoint of the best model in {self.store.folder}")
        self._load_weights(best)

    def _loop(self, log: MetricsLog | None) -> None:
        totals = StepTotals()
        self.wrapped.train()
        for step, indices, global_indices in self._batches():
            started = time.monotonic()
            self._one_step(step, indices, global_indices, totals)
            self.progress.step = step
            self.progress.seconds += time.monotonic() - started
            last = step == self.total_steps
            if step % self.training.log_every == 0 or last:
                totals = self._write_totals(log, totals)
            reached = False
            if step % self.training.evaluate_every == 0 or last:
                reached = self._validate(log)
                totals.since = time.monotonic()
            if step % self.training.checkpoint_every == 0 or last or reached or self._stop_signal:
                self._save()
            if self._stop_signal and not last:
                name = signal.Signals(self._stop_signal).name
                raise Interrupted(f"{name}: stopped after step {step}, state saved in {self.store.folder}")
            if reached:
                self.reporter.say(f"target accuracy reached at step {step}")
                return

    def _batches(self) -> Iterator[tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """(step, this process's indices, all processes' indices) from where training is to its end."""
        step = self.progress.step
        while step < self.total_steps:
            epoch, start = divmod(step, len(self.sampler))
            everything = self.sampler.global_batches(epoch)[start:]
            for indices, global_indices in zip(self.sampler.epoch(epoch, start), everything, strict=True):
                if step == self.total_steps:
                    return
                step += 1
                yield step, indices, global_indices

    def _one_step(
        self, step: int, indices: np.ndarray[Any, Any], global_indices: np.ndarray[Any, Any], totals: StepTotals
    ) -> None:
        accelerator, training = self.accelerator, self.training
        if training.resample_every is not None and step % training.resample_every == 0:
            resample(self.model, generator_for(self.seed, "frequencies", step))
        torch.manual_seed(derived_seed(self.seed, "dropout", step, accelerator.process_index))
        rate = learning_rate(self.schedule, self.base_rate, step, self.total_steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        pad_to = int(self.train_examples.lengths.max()) if training.pad_to_longest else None
        # [loss, correct, tokens, stop signal], summed over parts and processes.
        sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
        parts = [part for part in np.array_split(indices, training.accumulation) if len(part)]
        for number, part in enumerate(parts):
            batch = collate(self.train_examples, part, pad_to=pad_to).to(accelerator.device)
            is_last = number == len(parts) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.wrapped):
                with accelerator.autocast():
                    scores = class_scores(self.wrapped, batch)
                loss = nn.functional.cross_entropy(scores.float(), batch.labels, reduction="sum")
                # Processes average their gradients, so that each counts its sum as a share of the global mean.
                accelerator.backward(loss * (accelerator.num_processes / len(global_indices)))
            sums[0] += loss.detach()
            sums[1] += (scores.argmax(-1) == batch.labels).sum()
            sums[2] += batch.num_tokens
        sums[3] = float(self._stop_signal)
        loss_sum, correct, tokens, stop = accelerator.reduce(sums, "sum").tolist()
        if stop and not self._stop_signal:
            self._stop_signal = signal.SIGTERM
        if not math.isfinite(loss_sum):
            raise TrainingError(self._not_finite(step, loss_sum, global_indices))
        if training.clip_norm is not None:
            accelerator.clip_grad_norm_(self.wrapped.parameters(), training.clip_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        totals.loss += loss_sum
        totals.correct += correct
        totals.examples += len(global_indices)
        totals.tokens += int(tokens)
        self.progress.tokens += int(tokens)

    def _not_finite(self, step: int, loss: float, indices: np.ndarray[Any, Any]) -> str:
        newest = self.store.newest("step")
        safe = "there is no checkpoint yet" if newest is None else f"the last good checkpoint is {newest.folder}"
        return (
            f"the loss is {loss} at step {step}; {safe}. The batch had the training examples "
            f"{', '.join(map(str, indices.tolist()))}. A lower learning rate or training.clip_norm may help."
        )

    def _write_totals(self, log: MetricsLog | None, totals: StepTotals) -> StepTotals:
        seconds = time.monotonic() - totals.since
        loss, accuracy = totals.loss / totals.examples, totals.correct / totals.examples
        speed = totals.tokens / max(seconds, 1e-9)
        step = self.progress.step
        self.reporter.step(step, loss=loss, accuracy=accuracy, tokens_per_second=speed)
        if log is not None:
            rate = self.optimiser.param_groups[0]["lr"]
            log.write("train", step, loss=loss, accuracy=accuracy, learning_rate=rate, tokens_per_second=speed)
        return StepTotals()

    def _validate(self, log: MetricsLog | None) -> bool:
        """Evaluate, keep the model if it is the best so far, and say whether the target is reached."""
        result = self.evaluate(self.validation_examples)
        progress, step = self.progress, self.progress.step
        self.reporter.say(f"step {step}: validation accuracy {100 * result.mean:.2f}%, loss {result.loss:.4f}")
        if log is not None:
            log.write("validation", step, loss=result.loss, accuracy=result.mean, seconds=progress.seconds)
        for percent in range(10, 100, 10):
            if result.mean >= percent / 100 and str(percent) not in progress.first_reached:
                progress.first_reached[str(percent)] = step
                if self.training.keep_milestones and percent in MILESTONES and self.accelerator.is_main_process:
                    info = {"validation_accuracy": result.mean}
                    self.store.save(milestone(percent), step, {WEIGHTS: self._weights()}, info)
        # Among equal accuracies the lower loss: the first 100% on one draw is not the most reliable model.
        if (result.mean, -result.loss) > (progress.best_accuracy, -progress.best_loss):
            progress.best_accuracy, progress.best_loss, progress.best_step = result.mean, result.loss, step
            if self.accelerator.is_main_process:
                self.store.save("best", step, {WEIGHTS: self._weights()}, {"validation_accuracy": result.mean})
                self.store.prune("best", 1)
        target = self.training.target_accuracy
        return target is not None and result.mean >= target

    def evaluate(self, examples: Examples, *, draws: int | None = None) -> Evaluation:
        """Accuracy on some examples, with the present frequencies or averaged over new draws."""
        return evaluate(
            self.model,
            examples,
            accelerator=self.accelerator,
            batch_size=max(self.training.evaluation_batch_size, self.accelerator.num_processes),
            num_classes=self.num_classes,
            draws=draws,
            seed=self.seed,
        )

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            files = {WEIGHTS: self._weights(), OPTIMISER: optimiser_tensors(self.model, self._plain_optimiser())}
            self.store.save("step", self.progress.step, files, {"progress": vars(self.progress)})
            self.store.prune("step", self.training.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def _plain_optimiser(self) -> torch.optim.Optimizer:
        return getattr(self.optimiser, "optimizer", self.optimiser)

    def _load_weights(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.weights())

    @contextmanager
    def _watching_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a stop after the step; a second one stops at once."""

        def ask(number: int, _frame: FrameType | None) -> None:
            if self._stop_signal:
                raise KeyboardInterrupt
            self._stop_signal = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
