"""How time and memory are measured: interleaved repeats with medians, and the peak of a process of its own."""

import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

MEBIBYTE = 2**20


def median_times(
    subjects: Mapping[str, Callable[[], object]], *, repeats: int, on_round: Callable[[int], None] | None = None
) -> dict[str, float]:
    """Median seconds of each subject. Every round runs all subjects once, so that a slow minute of the machine hits
    all alike.

    A first round warms up and is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for round_index in range(repeats + 1):
        for name, run in subjects.items():
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if round_index > 0:
                times[name].append(elapsed)
        if on_round is not None:
            on_round(round_index)
    return {name: statistics.median(values) for name, values in times.items()}


def extra_peak_memory(run: Callable[[], None]) -> int:
    """Bytes by which the resident size of this process rises above its present size while `run` runs.

    To be called once in a process of its own, warmed up, with all operands in place.
    """
    before = _reset_peak()
    run()
    return max(0, _peak() - before)


def _reset_peak() -> int:
    """Forget the highest resident size so far, where the system can (Linux); returns the present one in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except OSError:
        return _rusage_peak()


def _peak() -> int:
    return _status_bytes("VmHWM") if os.path.exists("/proc/self/status") else _rusage_peak()


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _rusage_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def in_own_process(arguments: Sequence[str]) -> str:
    """What `python -m klformer.bench ARGUMENTS` prints, run in a new process.

    Raises:
        RuntimeError: with the end of its error output, if it fails.
    """
    result = subprocess.run(
        [sys.executable, "-m", "klformer.bench", *arguments], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed with exit code {result.returncode}:\n{result.stderr[-2000:]}")
    return result.stdout


def describe_machine() -> dict[str, Any]:
    """Date, machine and versions, to be printed with every figure."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def log_log_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope of log(value) against log(size): 1 is linear growth, 2 quadratic."""
    fit = statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in values])
    return fit.slope
