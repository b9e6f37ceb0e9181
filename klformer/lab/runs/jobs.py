"""Trainings side by side: a few processes with one thread each, which take one run after the other.

What a run has to say goes through a pipe to the process that started it, which is the only one to print. A signal
reaches that one alone: it asks the others to save their state, waits for them, and then ends.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from klformer.errors import ArgumentError, Interrupted, RunError, UserError
from klformer.lab.runs.changes import LENGTH, changes
from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.train import finished_result, train_run
from klformer.lab.tasks import build_task
from klformer.lab.training.processes import is_distributed, is_main_process
from klformer.lab.training.progress import RelayingReporter, Reporter, SilentReporter, Told
from klformer.lab.training.signals import STOPPING
from klformer.plugins import load_plugins

Kind = Told | Literal["done", "stopped", "refused", "failed"]


@dataclass(frozen=True)
class Job:
    """A run that is to be done."""

    config: ExperimentConfig
    folder: Path


def train_side_by_side(
    jobs: Sequence[Job], *, workers: int, reporter_of: Callable[[int], Reporter]
) -> list[dict[str, Any]]:
    """Train all, so many at a time; returns their results in the order of the jobs."""
    with _team(min(workers, len(jobs))) as (team, signals):
        return _Foreman(jobs, team, signals, reporter_of).work()


class _Worker:
    """A process with its pipe, and the number of the job that it is at."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.job: int | None = None

    def ask_to_stop(self) -> None:
        """Make it save its state and end between steps; without a job it ends at once."""
        if self.job is None:
            self.pipe.close()
        elif self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGTERM)


class _Foreman:
    """Hands out jobs and listens."""

    def __init__(
        self, jobs: Sequence[Job], team: list[_Worker], signals: list[int], reporter_of: Callable[[int], Reporter]
    ) -> None:
        self.jobs = jobs
        self.idle = list(team)
        self.busy: list[_Worker] = []
        self.signals = signals
        self.reporter_of = reporter_of
        self.reporters: dict[int, Reporter] = {}
        self.results: dict[int, dict[str, Any]] = {}
        self.problem: Exception | None = None

    @property
    def is_stopping(self) -> bool:
        return bool(self.signals) or self.problem is not None

    def work(self) -> list[dict[str, Any]]:
        waiting = list(range(len(self.jobs)))
        asked = 0
        while waiting or self.busy:
            while waiting and self.idle and not self.is_stopping:
                self._hand_out(waiting.pop(0))
            if self.is_stopping:
                waiting = []
                # Once for each signal: the second one stops a run in the middle of a step.
                if asked < len(self.signals) + (self.problem is not None):
                    asked += 1
                    for worker in self.busy:
                        worker.ask_to_stop()
            ready = wait([worker.pipe for worker in self.busy], timeout=0.2)
            for worker in [worker for worker in self.busy if worker.pipe in ready]:
                self._listen(worker)
        if self.problem is not None:
            raise self.problem
        if self.signals:
            name = signal.Signals(self.signals[0]).name
            raise Interrupted(f"{name}: {len(self.results)} of {len(self.jobs)} runs are done, the others are saved")
        return [self.results[number] for number in range(len(self.jobs))]

    def _hand_out(self, number: int) -> None:
        worker = self.idle.pop()
        worker.job = number
        self.reporters[number] = self.reporter_of(number)
        self.busy.append(worker)
        worker.pipe.send(self.jobs[number])

    def _listen(self, worker: _Worker) -> None:
        assert worker.job is not None
        name, reporter = self.jobs[worker.job].folder.name, self.reporters[worker.job]
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            kind, content = "refused", f"its process ended with exit code {worker.process.exitcode}"
            if self.is_stopping:
                kind, content = "stopped", "ended before it began, or in the middle of a step"
        if kind in ("say", "start", "step", "finish"):
            getattr(reporter, kind)(*content[0], **content[1])
            return
        if kind == "done":
            self.results[worker.job] = content
        elif kind == "stopped":
            reporter.say(content)
        elif self.problem is None:  # of several the first is told
            self.problem = RunError(f"{name}: {content}") if kind == "refused" else RuntimeError(f"{name}: {content}")
        worker.job = None
        self.busy.remove(worker)
        if kind == "done":
            self.idle.append(worker)


@contextmanager
def _team(size: int) -> Iterator[tuple[list[_Worker], list[int]]]:
    """Start processes that wait for jobs, and note the signals that come; no process is left afterwards."""
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    # Not forked: threads that torch has started would be missing in the copy.
    context = multiprocessing.get_context("spawn")
    before = {number: signal.getsignal(number) for number in STOPPING}
    watched = [number for number in STOPPING if before[number] is not signal.SIG_IGN]
    # What is started meanwhile ignores it for good: the terminal sends Ctrl-C to all its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    team: list[_Worker] = []
    try:
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            team.append(_Worker(process, ours))
        for number in watched:
            signal.signal(number, note)
        yield team, signals
    finally:
        for worker in team:
            worker.pipe.close()
        for worker in team:
            worker.process.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(pipe: Connection) -> None:
    """Do jobs in a process of the team, until its pipe is closed."""
    os.setsid()  # away from the terminal
    torch.set_num_threads(1)
    load_plugins()
    reporter = _Forwarding(pipe)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            # As Ctrl-C, where training does not watch for it.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            outcome: tuple[Kind, Any] = ("done", train_run(job.config, job.folder, resume=True, reporter=reporter))
        except Interrupted as stop:
            outcome = ("stopped", str(stop))
        except KeyboardInterrupt:
            outcome = ("stopped", "interrupted before the first step, or after the last")
        except UserError as error:
            outcome = ("refused", str(error))
        except Exception:
            outcome = ("failed", traceback.format_exc())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pipe.send(outcome)
        if outcome[0] != "done":
            return


class _Forwarding(RelayingReporter):
    """Sends what it is told."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, kind: Told, *arguments: Any, **named: Any) -> None:
        self._pipe.send((kind, (arguments, named)))


def train_several(
    runs: Sequence[Job],
    *,
    reporter: Reporter,
    jobs: int = 1,
    labelled: Callable[[str], Reporter] = lambda label: SilentReporter(),
) -> list[dict[str, Any]]:
    """Do every run that is not done yet; returns all results, in the order of the runs."""
    if jobs > 1 and is_distributed():
        raise ArgumentError(f"jobs must be 1 where torchrun has started several processes, got {jobs}")
    if not is_main_process():
        reporter = SilentReporter()
    finished = [finished_result(run.config, run.folder) for run in runs]
    for run, done in zip(runs, finished, strict=True):
        if done is None:
            _check_length(run)
    if jobs == 1:
        return _one_after_the_other(runs, finished, reporter)
    return _side_by_side(runs, finished, reporter, jobs, labelled)


def _check_length(run: Job) -> None:
    """Refuse to make a finished run longer: its schedule would be another than that of the runs beside it."""
    folder = RunFolder(run.folder)
    if not folder.is_run():
        return
    before = folder.config()
    longer = [text for field, text in changes(before, run.config).items() if field in LENGTH]
    if longer and finished_result(before, run.folder) is not None:
        raise RunError(
            f"{run.folder} is finished and is not made longer: {', '.join(longer)}; ask for what it was, or give "
            "another --out"
        )


Finished = Sequence[dict[str, Any] | None]


def _one_after_the_other(runs: Sequence[Job], finished: Finished, reporter: Reporter) -> list[dict[str, Any]]:
    results = []
    for number, (run, done) in enumerate(zip(runs, finished, strict=True), start=1):
        reporter.say(f"[{number}/{len(runs)}] {run.folder.name}{': done already' if done else ''}")
        results.append(done or train_run(run.config, run.folder, resume=True, reporter=reporter))
    return results


def _side_by_side(
    runs: Sequence[Job], finished: Finished, reporter: Reporter, jobs: int, labelled: Callable[[str], Reporter]
) -> list[dict[str, Any]]:
    todo = [number for number, done in enumerate(finished) if done is None]
    if len(todo) < len(runs):
        reporter.say(f"{len(runs) - len(todo)} of {len(runs)} runs are done already")
    if not todo:
        return [done for done in finished if done is not None]
    quiet = isinstance(reporter, SilentReporter)
    # Once, before several want to.
    for config in {(run.config.task, run.config.data): run.config for run in runs}.values():
        build_task(config.task, config.data, quiet=quiet).prepare()

    def reporter_of(number: int) -> Reporter:
        return labelled(f"[{todo[number] + 1}/{len(runs)}]")

    made = train_side_by_side([runs[number] for number in todo], workers=jobs, reporter_of=reporter_of)
    new = dict(zip(todo, made, strict=True))
    return [done if done is not None else new[number] for number, done in enumerate(finished)]
