"""Versions and hardware, to be kept with every figure."""

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import klformer


def describe_environment() -> dict[str, Any]:
    """Versions, machine and time, as data."""
    return {
        "klformer": klformer.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_machine() -> dict[str, Any]:
    """Date, machine and versions in words, to be printed with every figure."""
    found = describe_environment()
    return {
        "date": found["date"][:10],
        "machine": f"{found['processor']}, {found['threads']} threads, torch {found['torch']}",
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
