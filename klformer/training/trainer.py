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

from klformer.data import BucketSampler, Examples, collate
from klformer.errors import ArgumentError, Interrupted, RunError
from klformer.noise import resample
from klformer.training.checkpoint import (
    MILESTONES,
    OPTIMISER,
    WEIGHTS,
    Checkpoint,
    CheckpointStore,
    load_optimiser_tensors,
    milestone,
    optimiser_tensors,
    put_weights,
)
from klformer.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig
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
    """Sums over the steps since the last line of the log, over all processes; saved with every checkpoint."""

    loss: float = 0.0
    correct: float = 0.0
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0


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
        if training.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            raise ArgumentError("training.mixed_precision must be 'no' or 'bf16' on a CPU, got 'fp16'")
        self.training = training
        self.schedule = schedule
        self.base_rate = optimiser.learning_rate
        self.folder = folder
        self.accelerator = accelerator
        self.reporter = reporter
        self.seed = seed
        self.num_classes = num_classes
        self.train_examples, self.validation_examples = train, validation
        # The batches of all processes together: they must not depend on how many there are.
        self.sampler = BucketSampler(train.lengths, batch_size=training.batch_size, seed=seed)
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
        self.progress, self.totals = Progress(), StepTotals()
        # The signal that this process got. Other processes may not have got it: only what all agree on is acted on.
        self._signal = 0

    def _total_steps(self) -> int:
        by_epochs = math.inf if self.training.max_epochs is None else self.training.max_epochs * len(self.sampler)
        by_steps = math.inf if self.training.max_steps is None else self.training.max_steps
        return int(min(by_epochs, by_steps))

    @property
    def is_done(self) -> bool:
        """Whether all steps are done or the target is reached."""
        target = self.training.target_accuracy
        reached = target is not None and self.progress.best_accuracy >= target
        return reached or self.progress.step >= self.total_steps

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint; False if there is none yet. What is newer is removed.

        Raises:
            RunError: all checkpoints are damaged, but there is a best model, which starting over would remove.
        """
        checkpoint = self.store.newest("step")
        best = self.store.newest("best")
        if checkpoint is None and best is not None and self.store.holds("step"):
            raise RunError(
                f"no checkpoint in {self.store.folder} is whole, so that the run can't go on; its best model, of step "
                f"{best.step}, is: `klformer eval {self.folder}` reads it. Train again under another --name"
            )
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for kind in ("step", "best", *map(milestone, MILESTONES)):
                self.store.remove_after(kind, 0 if checkpoint is None else checkpoint.step)
        if checkpoint is None:
            return False
        self._load_weights(checkpoint)
        load_optimiser_tensors(self.model, self._plain_optimiser(), checkpoint.optimiser())
        self.progress = Progress(**checkpoint.info["progress"])
        self.totals = StepTotals(**checkpoint.info["totals"])
        if self.accelerator.scaler is not None and "scaler" in checkpoint.info:
            self.accelerator.scaler.load_state_dict(checkpoint.info["scaler"])
        return True

    def run(self) -> None:
        """Train to the end; nothing happens if that is reached already.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the state is saved.
            RunError: loss or gradient are not finite any more, or a file can't be written.
        """
        if self.is_done:
            return
        log = MetricsLog(self.folder, self.progress.step) if self.accelerator.is_main_process else None
        self.reporter.start(self.progress.step, self.total_steps)
        try:
            with self._watching_signals():
                self._loop(log)
        finally:
            self.reporter.finish()
            if log is not None:
                log.close()
        if self._signal:
            raise Interrupted(self._complete())

    def load_best(self) -> None:
        """Put the weights with the best validation accuracy into the model, or the last ones if those are damaged."""
        best = self.store.newest("best", up_to=self.progress.best_step)
        if best is None:
            best = self.store.newest("step")
            if best is None:
                raise RunError(f"there is no whole checkpoint in {self.store.folder}; train under another --name")
            self.reporter.say(
                f"there is no whole checkpoint of the best model, of step {self.progress.best_step}; using the newest "
                f"one, {best.folder}. The same training under another --name gives the best one again"
            )
        self.progress.best_step = best.step
        self._load_weights(best)

    @contextmanager
    def final_evaluation(self) -> Iterator[None]:
        """Around what comes after training: Ctrl-C loses nothing then, and says so."""
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(self._complete()) from None

    def _complete(self) -> str:
        return f"training is complete ({self.progress.step} steps), its evaluation was interrupted; --resume evaluates"

    def _loop(self, log: MetricsLog | None) -> None:
        self.wrapped.train()
        for step, indices in self._batches():
            started = time.monotonic()
            stop = self._one_step(step, indices)
            seconds = time.monotonic() - started
            self.progress.step = step
            self.progress.seconds += seconds
            self.totals.seconds += seconds
            last = step == self.total_steps
            if step % self.training.log_every == 0 or last:
                self._write_totals(log)
            if step % self.training.evaluate_every == 0 or last:
                self._validate(log)
                stop = self._any_signal()
            if step % self.training.checkpoint_every == 0 or self.is_done or stop:
                self._save()
            if self.is_done:
                if not last:
                    self.reporter.say(f"target accuracy reached at step {step}")
                return
            if stop:
                name = signal.Signals(self._signal or signal.SIGTERM).name
                raise Interrupted(f"{name}: stopped after step {step}, state saved in {self.store.folder}")

    def _any_signal(self) -> bool:
        """Whether a process was asked to stop; the same in all of them."""
        asked = torch.tensor(float(self._signal), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, "sum").item())

    def _batches(self) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """(step, all processes' indices) from where training is to its end."""
        step = self.progress.step
        while step < self.total_steps:
            epoch, start = divmod(step, len(self.sampler))
            for indices in self.sampler.batches(epoch)[start : start + self.total_steps - step]:
                step += 1
                yield step, indices

    def _share(self, indices: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
        """This process's part of a batch, and what it counts.

        Gradients are averaged over all processes, which all have to take part: where there are fewer examples than
        processes, those without one work through another's and count nothing.
        """
        share = np.array_split(indices, self.accelerator.num_processes)[self.accelerator.process_index]
        return (share, 1.0) if len(share) else (indices[:1], 0.0)

    def _one_step(self, step: int, indices: np.ndarray[Any, Any]) -> bool:
        """One update with a batch of all processes; returns whether a process was asked to stop."""
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
        share, weight = self._share(indices)
        parts = [part for part in np.array_split(share, training.accumulation) if len(part)]
        for number, part in enumerate(parts):
            batch = collate(self.train_examples, part, pad_to=pad_to).to(accelerator.device)
            is_last = number == len(parts) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.wrapped):
                with accelerator.autocast():
                    scores = class_scores(self.wrapped, batch)
                loss = weight * nn.functional.cross_entropy(scores.float(), batch.labels, reduction="sum")
                # Processes average their gradients, so that each counts its sum as a share of the global mean.
                accelerator.backward(loss * (accelerator.num_processes / len(indices)))
            sums[0] += loss.detach()
            sums[1] += weight * (scores.argmax(-1) == batch.labels).sum()
            sums[2] += weight * batch.num_tokens
        sums[3] = float(self._signal)
        loss_sum, correct, tokens, stop = accelerator.reduce(sums, "sum").tolist()
        if not math.isfinite(loss_sum):
            raise RunError(self._not_finite(step, f"loss is {loss_sum}", indices))
        # Also without clipping: a gradient that is not finite must not reach the weights.
        limit = math.inf if training.clip_norm is None else training.clip_norm
        norm = float(accelerator.clip_grad_norm_(self.wrapped.parameters(), limit))
        # The scaler of fp16 skips such steps itself, and lowers its scale.
        if not math.isfinite(norm) and accelerator.scaler is None:
            raise RunError(self._not_finite(step, f"norm of the gradient is {norm}", indices))
        self.optimiser.step()
        self.optimiser.zero_grad()
        totals = self.totals
        totals.loss += loss_sum
        totals.correct += correct
        totals.examples += len(indices)
        totals.tokens += int(tokens)
        self.progress.tokens += int(tokens)
        return bool(stop)

    def _not_finite(self, step: int, what: str, indices: np.ndarray[Any, Any]) -> str:
        newest = self.store.newest("step")
        safe = "there is no checkpoint yet" if newest is None else f"the last good checkpoint is {newest.folder}"
        return (
            f"the {what} at step {step}; {safe}. The batch had the training examples "
            f"{', '.join(map(str, indices.tolist()))}. A lower learning rate or training.clip_norm may help."
        )

    def _write_totals(self, log: MetricsLog | None) -> None:
        totals, self.totals = self.totals, StepTotals()
        loss, accuracy = totals.loss / totals.examples, totals.correct / totals.examples
        speed = totals.tokens / max(totals.seconds, 1e-9)
        step = self.progress.step
        self.reporter.step(step, loss=loss, accuracy=accuracy, tokens_per_second=speed)
        if log is not None:
            rate = self.optimiser.param_groups[0]["lr"]
            log.write("train", step, loss=loss, accuracy=accuracy, learning_rate=rate, tokens_per_second=speed)

    def _validate(self, log: MetricsLog | None) -> None:
        """Evaluate, and keep the model if it is the best so far."""
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
                self.store.prune("best", self.training.keep_checkpoints, up_to=step)

    def evaluate(self, examples: Examples, *, draws: int | None = None) -> Evaluation:
        """Accuracy on some examples, with the present frequencies or averaged over new draws."""
        return evaluate(
            self.model,
            examples,
            accelerator=self.accelerator,
            batch_size=self.training.evaluation_batch_size,
            num_classes=self.num_classes,
            draws=draws,
            seed=self.seed,
        )

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            files = {WEIGHTS: self._weights(), OPTIMISER: optimiser_tensors(self.model, self._plain_optimiser())}
            scaler = self.accelerator.scaler
            info: dict[str, Any] = {"progress": vars(self.progress), "totals": vars(self.totals)}
            if scaler is not None:
                info["scaler"] = scaler.state_dict()
            self.store.save("step", self.progress.step, files, info)
            self.store.prune("step", self.training.keep_checkpoints, up_to=self.progress.step)
        self.accelerator.wait_for_everyone()

    def _weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def _plain_optimiser(self) -> torch.optim.Optimizer:
        return getattr(self.optimiser, "optimizer", self.optimiser)

    def _load_weights(self, checkpoint: Checkpoint) -> None:
        put_weights(self.model, checkpoint.weights(), checkpoint.folder)

    @contextmanager
    def _watching_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a stop after the step; a second one stops at once."""

        def ask(number: int, _frame: FrameType | None) -> None:
            if self._signal:
                raise Interrupted("stopped at once, in the middle of a step; what was saved before it is whole")
            self._signal = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
