"""Versions, hardware and the command that was typed, to be kept with every figure."""

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import klformer


def describe_environment() -> dict[str, Any]:
    """Return versions, machine and time."""
    return {
        "klformer": klformer.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_machine() -> dict[str, Any]:
    """Return the same with the day in place of the time, and the machine in words, to be printed with every figure."""
    found = describe_environment()
    machine = f"{found['processor']}, {found['threads']} threads, torch {found['torch']}"
    return found | {"date": found["date"][:10], "machine": machine}


def typed_command() -> str:
    """Return what started this process, as it is typed, with what its allocator was told and its number of threads:
    klformer, klformer under torchrun (of this machine), or a script."""
    program, *arguments = sys.argv
    name = Path(program).name
    threads = os.environ.get("OMP_NUM_THREADS")
    given = allocator_variables(os.environ).split() + ([] if threads is None else [f"OMP_NUM_THREADS={threads}"])
    if name == "__main__.py":
        processes = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
        torchrun = [] if processes is None else ["torchrun", "--nproc-per-node", processes, "-m"]
        started = [*torchrun, "klformer"]
    else:
        started = ["python", program] if program.endswith(".py") else [name]
    return shlex.join([*given, *started, *arguments])


def allocator_variables(environment: Mapping[str, str]) -> str:
    """Return what of an environment is for glibc's allocator, as it is typed before a command."""
    return " ".join(f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith("MALLOC_"))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
