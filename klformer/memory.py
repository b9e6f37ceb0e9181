"""How much memory a process takes, at present and at its peak."""

import mmap
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEBIBYTE = 2**20


def extra_peak_memory(run: Callable[[], None], device: str = "cpu") -> int:
    """Bytes by which memory rises above its present size while `run` runs.

    To be called once in a process of its own, warmed up, with all operands in place.
    """
    before = reset_peak_memory(device)
    run()
    return max(0, peak_memory(device) - before)


def reset_peak_memory(device: str) -> int:
    """Forget the highest size so far, where the system can; returns the present one in bytes.

    On a GPU that of torch's tensors, otherwise the resident size of this process. Only Linux can forget the latter.
    """
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except OSError:
        return _rusage_peak()


def peak_memory(device: str) -> int:
    """The highest size in bytes since `reset_peak_memory`."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    return _status_bytes("VmHWM") if os.path.exists("/proc/self/status") else _rusage_peak()


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _rusage_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def release(values: "NDArray[Any]") -> None:
    """Let go of the pages of an array that is mapped from a file; they are read again when they are needed.

    For whoever has gone through all of it: what was read counts as this process's memory otherwise. Nothing happens to
    any other array.
    """
    mapped = getattr(values, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
