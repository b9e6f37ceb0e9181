"""How time and memory are measured (interleaved repeats, medians, the peak of a process of its own) and written."""

import math
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from klformer.files import write_json
from klformer.lab.environment import typed_command
from klformer.ops.spectral_product import record_backends


def make_report(environment: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a benchmark found, with where it was measured and the command that was typed."""
    return {"environment": environment, "command": typed_command(), **content}


def write_report(
    path: Path | None, environment: Mapping[str, Any], content: Mapping[str, Any], console: Console
) -> None:
    """Write the report where it was asked for, and say so."""
    if path is not None:
        write_json(path, make_report(environment, content))
        console.print(f"figures written to {path}")


Subject = TypeVar("Subject")
Options = TypeVar("Options", bound=Any)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The sizes of an attention."""

    heads: int = 8
    """Heads H."""
    head_dim: int = 64
    """Size D = E of queries, keys and values."""
    num_frequencies: int = 128
    """Frequencies R of the kernels."""


@dataclass(frozen=True, kw_only=True)
class Shape(Heads):
    """The shape of a problem but for its length; every attention has the same."""

    batch: int = 1
    """Sequences B."""

    def as_dict(self) -> dict[str, int]:
        """Return the sizes alone, without what a benchmark that is a shape has besides."""
        return {name: value for name, value in asdict(self).items() if name in _SIZES}

    def describe(self) -> str:
        return f"B={self.batch} H={self.heads} D=E={self.head_dim} R={self.num_frequencies}"


#: What reports call the sizes of a problem.
_SIZES = ("batch", "heads", "head_dim", "num_frequencies", "num_layers")


def backends_of(run: Callable[[], object]) -> list[str]:
    """Return the names of the backends that serve products in a call."""
    with record_backends() as served:
        run()
    return sorted({name for _, name in served})


def describe_backends(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say who served which subjects, for rows with their names and backends."""
    by_backend: dict[str, list[str]] = {}
    for row in rows:
        for backend in row["backends"]:
            by_backend.setdefault(backend, []).append(row["name"])
    served = (f"{backend}: {', '.join(dict.fromkeys(names))}" for backend, names in by_backend.items())
    return f"served by {'; '.join(served)}" if by_backend else "no products of kernels"


def round_times(
    subjects: Mapping[Subject, Callable[[], object]],
    *,
    repeats: int,
    slow_seconds: float = math.inf,
    slow_repeats: int = 1,
) -> dict[Subject, list[float]]:
    """Return the seconds of each subject in each round. Every round runs all subjects once, so that a slow minute of
    the machine hits all alike.

    A first round warms up and is not counted. Subjects that took more than `slow_seconds` in it take part in the next
    `slow_repeats` rounds only.
    """
    times: dict[Subject, list[float]] = {subject: [] for subject in subjects}
    rounds = dict.fromkeys(subjects, repeats)
    for index in range(repeats + 1):
        for subject, run in subjects.items():
            if index > rounds[subject]:
                continue
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if index > 0:
                times[subject].append(elapsed)
            elif elapsed > slow_seconds:
                rounds[subject] = min(repeats, slow_repeats)
    return times


def both_times(
    subjects: Mapping[Subject, Callable[[], object]],
    *,
    repeats: int,
    slow_seconds: float = math.inf,
    slow_repeats: int = 1,
) -> dict[Subject, tuple[list[float], list[float]]]:
    """Return, as `round_times`, seconds of the wall, and of the processor (all threads), which other work disturbs
    less."""
    processor: dict[Subject, list[float]] = {subject: [] for subject in subjects}

    def counted(subject: Subject, run: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            start = time.process_time()
            run()
            processor[subject].append(time.process_time() - start)

        return call

    timed = {subject: counted(subject, run) for subject, run in subjects.items()}
    wall = round_times(timed, repeats=repeats, slow_seconds=slow_seconds, slow_repeats=slow_repeats)
    return {subject: (wall[subject], processor[subject][1:]) for subject in subjects}  # the first warms up


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


#: For processes whose memory is measured. glibc keeps freed blocks that are smaller than a threshold, and moves the
#: threshold as it goes, so that the same step has one peak or another; with a fixed one, tensors are given back.
GIVE_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": str(256 * 1024)}


#: For processes that keep the memory that they free, instead of giving it back and having it zeroed again: glibc gives
#: back large blocks by default, which costs whoever writes out large tensors more than their arithmetic.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}


def with_kept_memory(run: Callable[[Options], Result], options: Options) -> Result:
    """Return what a benchmark finds in a process that keeps the memory it frees, time alone.

    Args:
        run: The benchmark, as a function that is imported by its name.
        options: A dataclass with the fields `memory` and `kept`.
    """
    again = replace(options, memory=False, kept=False)
    return in_own_process(run, again, environment=KEEP_FREED_MEMORY)


def in_own_process(
    run: Callable[..., Result], *arguments: object, environment: Mapping[str, str] = GIVE_MEMORY_BACK
) -> Result:
    """Return what a function gives in a new process, with some more in its environment.

    Args:
        run: It is imported by its name there.
        arguments: What it is called with.

    Raises:
        RuntimeError: if it fails, with the reason in the first line, and more of its error output below.
    """
    command = [sys.executable, "-m", "klformer.lab.bench"]
    call = pickle.dumps((run, arguments))
    done = subprocess.run(command, input=call, capture_output=True, check=False, env=os.environ | environment)
    if done.returncode:
        errors = done.stderr.decode(errors="replace")
        raise RuntimeError(f"{_reason(done.returncode, errors)}\n{run.__name__}{arguments}:\n{errors[-2000:]}")
    found: Result = pickle.loads(done.stdout)
    return found


def _reason(code: int, errors: str) -> str:
    """Return why a process ended: the signal that killed it, or the last line of its error output."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", most likely for want of memory" if name == "SIGKILL" else "")
    return f"exit code {code}: {(errors.strip().splitlines() or ['no message'])[-1]}"


def log_log_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log(value) against log(size): 1 is linear growth, 2 quadratic."""
    fit = statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in values])
    return fit.slope


def growth_power(lengths: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the power of the length as which values grow; None unless two of them are above 0."""
    points = [(length, value) for length, value in zip(lengths, values, strict=True) if value > 0]
    return log_log_slope(*zip(*points, strict=True)) if len(points) > 1 else None


def crossover(lengths: Sequence[float], times: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return the length from which on `times` stay below `reference`, on straight lines between measurements in
    logarithms.

    The shortest length if they are below from the start, None if not even at the longest.
    """
    gains = [math.log(theirs / mine) for mine, theirs in zip(times, reference, strict=True)]
    slower = [index for index, gain in enumerate(gains) if gain <= 0]
    if not slower:
        return lengths[0]
    last = slower[-1]
    if last == len(lengths) - 1:
        return None
    share = -gains[last] / (gains[last + 1] - gains[last])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** share
