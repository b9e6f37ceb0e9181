"""The one training loop, on accelerate: any objective, any model, one process or many.

Everything random is a function of (seed, step, rank), and the order of the data of (seed, epoch). A checkpoint
therefore needs the weights, the optimiser and the step, and a resumed run is the uninterrupted one, bit for bit.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn

from klformer.distributed import sequence_parallel
from klformer.errors import ArgumentError, Interrupted, RunError
from klformer.lab.data import BucketSampler, Examples
from klformer.lab.data.sequences import IntArray
from klformer.lab.training.callbacks import Callback, Validation
from klformer.lab.training.checkpoint import CheckpointStore
from klformer.lab.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig
from klformer.lab.training.evaluation import Evaluation, evaluate
from klformer.lab.training.log import MetricsLog
from klformer.lab.training.objective import Objective
from klformer.lab.training.optimiser import build_optimiser, learning_rate, set_learning_rate
from klformer.lab.training.processes import Layout, make_layout
from klformer.lab.training.progress import AttendedReporter, Reporter
from klformer.lab.training.saving import Progress, Saver, StepTotals
from klformer.lab.training.seeds import derived_seed, generator_for
from klformer.lab.training.sharding import shard
from klformer.lab.training.signals import StopSignal
from klformer.lab.training.step import CheckpointClock, NotFinite, Stepper, StepResult
from klformer.noise import resample

#: Steps that tell how long the others take.
ESTIMATE_AFTER = 10


class Trainer:
    """Trains a model for an objective, and keeps the best one."""

    def __init__(
        self,
        model: nn.Module,
        train: Examples,
        validation: Examples,
        *,
        objective: Objective,
        optimiser: OptimiserConfig,
        schedule: ScheduleConfig,
        training: TrainingConfig,
        store: CheckpointStore,
        open_log: Callable[[int], MetricsLog],
        accelerator: Accelerator,
        reporter: Reporter,
        seed: int,
        callbacks: Sequence[Callback] = (),
        layout: Layout | None = None,
    ) -> None:
        if training.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            raise ArgumentError("training.mixed_precision must be 'no' or 'bf16' on a CPU, got 'fp16'")
        _check_target(training, objective)
        for examples in (train, validation):
            objective.check_targets(torch.from_numpy(examples.targets))
        self.objective = objective
        self.metric = objective.selecting
        self.training = training
        self.schedule = schedule
        self.base_rate = optimiser.learning_rate
        self.store = store
        self.open_log = open_log
        self.accelerator = accelerator
        self._signal = StopSignal()
        self._clock = CheckpointClock(training.checkpoint_seconds)
        self.reporter = AttendedReporter(reporter, left=self._signal.hang_up)
        self.seed = seed
        self.callbacks = callbacks
        self.validation_examples = validation
        # Batches of all processes together: they must not depend on how many there are.
        self.sampler = BucketSampler(train.lengths, batch_size=training.batch_size, seed=seed)
        self.total_steps = self._total_steps()
        self.layout = make_layout(accelerator) if layout is None else layout
        self.model = model.to(accelerator.device)
        if self.layout.mesh is not None:
            sequence_parallel(self.model, self.layout.mesh)
        if self.layout.shards is None:
            self.wrapped, self.optimiser = accelerator.prepare(self.model, build_optimiser(self.model, optimiser))
        else:
            shard(self.model, self.layout.shards)
            self.wrapped, self.optimiser = self.model, accelerator.prepare(build_optimiser(self.model, optimiser))
        self.saver = Saver(
            store,
            self.model,
            self.optimiser,
            accelerator=accelerator,
            callbacks=callbacks,
            keep=training.keep_checkpoints,
        )
        self.stepper = Stepper(
            self.wrapped,
            self.optimiser,
            train,
            objective=objective,
            training=training,
            accelerator=accelerator,
            layout=self.layout,
            signal=self._signal,
            clock=self._clock,
        )
        self.progress, self.totals = Progress(), StepTotals()

    def _total_steps(self) -> int:
        by_epochs = math.inf if self.training.max_epochs is None else self.training.max_epochs * len(self.sampler)
        by_steps = math.inf if self.training.max_steps is None else self.training.max_steps
        return int(min(by_epochs, by_steps))

    @property
    def is_done(self) -> bool:
        """Whether all steps are done or the target is reached."""
        return self.has_reached(self.training.target) or self.progress.step >= self.total_steps

    def has_reached(self, target: float | None) -> bool:
        """Return whether the best model so far is as good as a target; False if there is none."""
        best = self.progress.best_metric
        return target is not None and best is not None and self.metric.reaches(best, target)

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint; False if there is none yet. What is newer is removed."""
        state = self.saver.restore()
        if state is not None:
            self.progress, self.totals = state
        return state is not None

    def run(self) -> None:
        """Train to the end; nothing happens if that is reached already."""
        if self.is_done:
            return
        self.wrapped.train()
        with self._recording() as log, self._signal.watched():
            self._clock.start()
            first, began = self.progress.step, time.monotonic()
            for step, indices in self._batches():
                if step == first + ESTIMATE_AFTER + 1:
                    self._estimate((time.monotonic() - began) / ESTIMATE_AFTER)
                done = self._one_step(step, indices)
                stop = self._finish_step(done, log)
                if self.is_done:
                    break
                if stop:
                    saved = f"state saved in {self.store.folder}"
                    raise Interrupted(f"{self._signal.name}: stopped after step {step}, {saved}")
        if self._signal.number:
            raise Interrupted(self._complete())

    @contextmanager
    def _recording(self) -> Iterator[MetricsLog | None]:
        """Open the record, in the process that writes it, and the display; close both at the end."""
        log = self.open_log(self.progress.step) if self.accelerator.is_main_process else None
        self.reporter.start(self.progress.step, self.total_steps)
        try:
            yield log
        finally:
            self.reporter.finish()
            if log is not None:
                log.close()

    def load_best(self) -> None:
        """Put the weights of the best validation into the model, or the last ones if those are damaged."""
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
        self.saver.load_weights(best)

    @contextmanager
    def final_evaluation(self) -> Iterator[None]:
        """Say, at Ctrl-C after training, that nothing is lost."""
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(self._complete()) from None

    def evaluate(self, examples: Examples, *, draws: int | None = None) -> Evaluation:
        """Compute all metrics on some examples, with the present frequencies or averaged over new draws."""
        return evaluate(
            self.model,
            examples,
            objective=self.objective,
            accelerator=self.accelerator,
            batch_size=self.training.evaluation_batch_size,
            draws=draws,
            seed=self.seed,
            layout=self.layout,
        )

    def _complete(self) -> str:
        return f"training is complete ({self.progress.step} steps), its evaluation was interrupted; --resume evaluates"

    def _finish_step(self, done: StepResult, log: MetricsLog | None) -> bool:
        """Log, evaluate and save as far as it is time to; return whether a process was asked to stop."""
        step, stop = self.progress.step, done.stop
        last = step == self.total_steps
        if step % self.training.log_every == 0 or last:
            self._write_totals(log)
        if step % self.training.evaluate_every == 0 or last:
            self._validate(log)
            stop = self._signal.came_to_any(self.accelerator)
        if step % self.training.checkpoint_every == 0 or self.is_done or stop or done.save:
            with self._clock.saving():
                self.saver.save(self.progress, self.totals)
        if self.is_done and not last:
            self.reporter.say(f"target {self.metric.name} reached at step {step}")
        return stop

    def _estimate(self, seconds_a_step: float) -> None:
        """Say how long the rest takes, if it is long."""
        left = self.total_steps - self.progress.step
        if left * seconds_a_step > 60:
            self.reporter.say(
                f"about {left * seconds_a_step / 60:,.0f} min for {left:,} steps of {seconds_a_step:.2g} s, "
                "and the evaluations"
            )

    def _batches(self) -> Iterator[tuple[int, IntArray]]:
        """Yield (step, all processes' indices) from where training is to its end."""
        step = self.progress.step
        while step < self.total_steps:
            epoch, start = divmod(step, len(self.sampler))
            for indices in self.sampler.batches(epoch)[start : start + self.total_steps - step]:
                step += 1
                yield step, indices

    def _one_step(self, step: int, indices: IntArray) -> StepResult:
        """Do one update with a batch of all processes."""
        started, processor_started = time.monotonic(), time.process_time()
        every = self.training.resample_every
        if every is not None and step % every == 0:
            resample(self.model, generator_for(self.seed, "frequencies", step))
        torch.manual_seed(derived_seed(self.seed, "dropout", step, self.accelerator.process_index))
        set_learning_rate(self.optimiser, self._rate(step))
        try:
            done = self.stepper.step(indices, (self.seed, step))
        except NotFinite as problem:
            raise RunError(self._not_finite(step, str(problem), indices)) from problem
        totals = self.totals
        totals.loss += done.loss
        totals.count += done.count
        totals.tokens += done.tokens
        for name, value in done.metrics.items():
            totals.metrics[name] = totals.metrics.get(name, 0.0) + value
        seconds = time.monotonic() - started
        totals.seconds += seconds
        self.progress.step = step
        self.progress.tokens += done.tokens
        self.progress.seconds += seconds
        if self.progress.processor_seconds is not None:
            self.progress.processor_seconds += time.process_time() - processor_started
        return done

    def _rate(self, step: int) -> float:
        return learning_rate(self.schedule, self.base_rate, step, self.total_steps)

    def _not_finite(self, step: int, what: str, indices: IntArray) -> str:
        newest = self.store.newest("step")
        safe = "there is no checkpoint yet" if newest is None else f"the last good checkpoint is {newest.folder}"
        return (
            f"the {what} at step {step}; {safe}. The batch had the training examples "
            f"{', '.join(map(str, indices.tolist()))}. A lower learning rate or training.clip_norm may help."
        )

    def _write_totals(self, log: MetricsLog | None) -> None:
        totals, self.totals = self.totals, StepTotals()
        count = max(1, totals.count)
        loss, metrics = totals.loss / count, {name: value / count for name, value in totals.metrics.items()}
        speed = totals.tokens / max(totals.seconds, 1e-9)
        step = self.progress.step
        shown = {self.objective.metric(name): value for name, value in metrics.items()}
        self.reporter.step(step, loss=loss, metrics=shown, tokens_per_second=speed)
        if log is not None:
            rate = self._rate(step)
            log.write("train", step, {"loss": loss, **metrics, "learning_rate": rate, "tokens_per_second": speed})

    def _validate(self, log: MetricsLog | None) -> None:
        """Evaluate, and keep the model if it is the best so far."""
        result = self.evaluate(self.validation_examples)
        progress, step, metric = self.progress, self.progress.step, self.metric
        value = result.mean(metric.name)
        self.reporter.say(f"step {step}: validation {metric.name} {metric.show(value)}, loss {result.loss:.4f}")
        if log is not None:
            noted = [item for callback in self.callbacks for item in callback.measure().items()]
            figures = {"loss": result.loss, **result.means(), **dict(noted), "seconds": progress.seconds}
            log.write("validation", step, figures)
        for callback in self.callbacks:
            callback.after_validation(Validation(step, result, self.saver.keep_weights))
        # Among equals the lower loss: the first 100% on one draw is not the most reliable model.
        before = -math.inf if progress.best_metric is None else metric.rank(progress.best_metric)
        if (metric.rank(value), -result.loss) > (before, -progress.best_loss):
            progress.best_metric, progress.best_loss, progress.best_step = value, result.loss, step
            self.saver.keep_best(step, {f"validation_{metric.name}": value})


def _check_target(training: TrainingConfig, objective: Objective) -> None:
    target, metric = training.target, objective.selecting
    if target is not None and metric.percent and not 0 < target <= 1:
        raise ArgumentError(f"training.target must be above 0 and at most 1 for {metric.name}, got {target}")
