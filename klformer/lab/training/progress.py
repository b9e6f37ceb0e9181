"""What is shown while a run goes on: a live line on a terminal, plain lines elsewhere, nothing if quiet."""

import errno
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from klformer.lab.terminal import harmless
from klformer.lab.training.metrics import Metric

#: What a reporter is told: the names of its methods.
Told = Literal["say", "start", "step", "finish"]


class Reporter:
    """Told what happens; one that shows something overrides what it shows."""

    def say(self, message: str) -> None:
        """Show something that a person should read."""

    def start(self, step: int, total_steps: int) -> None:
        """Begin to show training that begins, or goes on, after `step` steps of `total_steps`."""

    def step(self, step: int, *, loss: float, metrics: Mapping[Metric, float], tokens_per_second: float) -> None:
        """Show averages of the steps since the last call."""

    def finish(self) -> None:
        """End what is shown of training."""


class SilentReporter(Reporter):
    """Shows nothing."""


class RelayingReporter(Reporter):
    """Passes on what it is told, by `tell`."""

    def tell(self, kind: Told, *arguments: Any, **named: Any) -> None:
        """Pass on the call of a method."""
        raise NotImplementedError

    def say(self, message: str) -> None:
        self.tell("say", message)

    def start(self, step: int, total_steps: int) -> None:
        self.tell("start", step, total_steps)

    def step(self, step: int, *, loss: float, metrics: Mapping[Metric, float], tokens_per_second: float) -> None:
        self.tell("step", step, loss=loss, metrics=dict(metrics), tokens_per_second=tokens_per_second)

    def finish(self) -> None:
        self.tell("finish")


class AttendedReporter(RelayingReporter):
    """Another reporter, as long as somebody listens: a terminal that is gone or a pipe without a reader ends no run in
    the middle of a step; `left` is called then, and nothing is shown from then on."""

    def __init__(self, reporter: Reporter, *, left: Callable[[], None]) -> None:
        self._reporter = reporter
        self._left = left

    def tell(self, kind: Told, *arguments: Any, **named: Any) -> None:
        try:
            getattr(self._reporter, kind)(*arguments, **named)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            self._reporter = SilentReporter()
            self._left()


class PlainReporter(Reporter):
    """Lines for a log file, at most one every few seconds for the steps."""

    def __init__(self, *, seconds_between: float = 15.0, label: str = "") -> None:
        self._label = label
        self._seconds_between = seconds_between
        self._total_steps = 0
        self._first_step = 0
        self._started = self._last = time.monotonic()

    def say(self, message: str) -> None:
        print(f"{self._label}{harmless(message)}", flush=True)

    def start(self, step: int, total_steps: int) -> None:
        self._first_step, self._total_steps = step, total_steps
        self._started = time.monotonic()

    def step(self, step: int, *, loss: float, metrics: Mapping[Metric, float], tokens_per_second: float) -> None:
        now = time.monotonic()
        if now - self._last < self._seconds_between and step < self._total_steps:
            return
        self._last = now
        left = (now - self._started) / max(1, step - self._first_step) * (self._total_steps - step)
        print(
            f"{self._label}step {step}/{self._total_steps}  loss {loss:.4f}  {_written(metrics, '  ')}"
            f"{tokens_per_second:,.0f} tokens/s  {left / 60:.1f} min left",
            flush=True,
        )


class LiveReporter(Reporter):
    """A progress bar with the latest figures."""

    def __init__(self, bars: Progress | None = None, *, label: str = "") -> None:
        self._progress = bars or _bars()
        self._label = label
        self._task: TaskID | None = None

    def say(self, message: str) -> None:
        self._progress.console.print(f"{self._label}{harmless(message)}", highlight=False, markup=False)

    def start(self, step: int, total_steps: int) -> None:
        self._task = self._progress.add_task(
            "train", total=total_steps, completed=step, label=self._label, loss="-", metrics="", speed="-"
        )
        self._progress.start()

    def step(self, step: int, *, loss: float, metrics: Mapping[Metric, float], tokens_per_second: float) -> None:
        if self._task is not None:
            self._progress.update(
                self._task,
                completed=step,
                loss=f"{loss:.4f}",
                metrics=_written(metrics, " "),
                speed=f"{tokens_per_second:,.0f}",
            )

    def finish(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        if not self._progress.tasks:
            self._progress.stop()


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.fields[label]}", markup=False),
        # The bar takes what the figures leave: of 80 columns, little.
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]} {task.fields[metrics]}{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(),
        expand=True,
    )


def _written(metrics: Mapping[Metric, float], space: str) -> str:
    """Write names and values, each with the space after it."""
    return "".join(f"{metric.name} {metric.show(value, digits=1)}{space}" for metric, value in metrics.items())


def make_reporter(*, quiet: bool) -> Reporter:
    """Make the reporter that fits where the output goes."""
    if quiet:
        return SilentReporter()
    return LiveReporter() if sys.stdout.isatty() else PlainReporter()


def labelled_reporters(*, quiet: bool) -> Callable[[str], Reporter]:
    """Gives the reporters of runs that go on side by side, each with a label in front of what it shows."""
    if quiet:
        return lambda _label: SilentReporter()
    if not sys.stdout.isatty():
        return lambda label: PlainReporter(label=f"{label} ")
    bars = _bars()
    return lambda label: LiveReporter(bars, label=f"{label} ")
