"""Disks that are too small: a limit on the size of files, which anybody may set, and a file system that is full."""

import resource
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def files_up_to(num_bytes):
    """No file may grow beyond so many bytes inside."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(folder, num_bytes):
    """`folder` as a file system of its own of so many bytes; skips the test where mounting is not allowed."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"can't mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
