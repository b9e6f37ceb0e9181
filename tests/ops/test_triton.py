"""Kernels for GPUs without one: in Triton's interpreter, and as machine code for real devices."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import klformer
from klformer.ops.triton import backend

FOLDER = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def python(*arguments, **environment):
    """What another process prints, which imports Triton under another environment."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PYTEST"))}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=FOLDER, env=known | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@needs_triton
def test_every_line_of_the_kernels_runs_and_is_right():
    tests = str(Path(__file__).with_name("interpreted_triton.py"))
    printed = python("-m", "pytest", "-p", "no:cacheprovider", tests, TRITON_INTERPRET="1")
    assert "100%" in printed
    assert "skipped" not in printed


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("device", "registers", "kernels"),
    [
        ("sm_80", 255, ["prf causal, of keys", "rks causal, of keys", "rks pairs, causal, of keys", "near, of keys"]),
        ("gfx942", 512, ["prf causal, of keys", "rks pairs, causal, of keys"]),
    ],
)
def test_kernels_are_machine_code_that_spills_nothing(device, registers, kernels, tmp_path):
    """Of those that take most; docs/howto/gpu.md has the command for all."""
    command = ["--plugin", "benchmarks", "bench", "kernels", "--devices", device, "--types", "bf16"]
    python("-m", "klformer", *command, "--kernels", *kernels, "--json", str(tmp_path / "table.json"))
    rows = json.loads((tmp_path / "table.json").read_text())["results"]
    assert [row["kernel"] for row in rows] == kernels
    for row in rows:
        assert row["spilt"] == 0, row
        assert 0 < row["registers"] <= registers, row
        assert 0 < row["shared"] <= 48 * 1024, row


def test_the_kernels_are_not_imported_before_they_are_used():
    """So that nothing of ours needs Triton; torch imports it by itself where it is installed."""
    use = "import sys; sys.modules['triton'] = None; import klformer"
    use += "; klformer.build_attention('gmm-prf', num_heads=2, head_dim=8)"
    assert python("-c", f"{use}; print([name for name in sys.modules if name.startswith('klformer.ops.triton.')])") == (
        "['klformer.ops.triton.backend']\n"
    )


def test_without_triton_the_backend_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(backend, "_FOUND", [False])
    attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8, backend="triton")
    with pytest.raises(
        ValueError, match=r"can't serve this product: triton is not installed: pip install 'klformer\[triton\]'"
    ):
        attention(*torch.randn(3, 1, 2, 5, 8))
