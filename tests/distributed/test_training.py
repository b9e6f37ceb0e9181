"""Training with sequences in parts is training: the same losses, the same checkpoints, on any number of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_support import final_state, tiny

from klformer.errors import ArgumentError
from klformer.lab.training.config import ParallelConfig
from klformer.lab.training.log import read_lines
from klformer.lab.training.processes import make_layout

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs that `distributed_training.py` makes."""
    folder = tmp_path_factory.mktemp("runs")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(TESTS / "distributed_training.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "steps", "way"), [("sparsity", 50, "parts"), ("recall", 10, "parts"), ("recall", 10, "shards")]
)
def test_losses_and_results_are_those_of_one_process(runs, task, steps, way):
    folders = [runs / f"{task}-{name}" for name in ("one", way)]
    logs = [read_lines(folder / "metrics.jsonl") for folder in folders]
    for kind, count in (("train", steps), ("validation", 2)):
        losses = [[line["loss"] for line in log if line["kind"] == kind] for log in logs]
        assert len(losses[0]) == count
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert results[1]["environment"]["sequence_parts"] == (2 if way == "parts" else 1)
    assert results[1]["train_tokens"] == results[0]["train_tokens"]
    for split in ("validation", "test"):
        one, parts = (result[split] for result in results)
        assert parts["accuracy_by_draw"] == one["accuracy_by_draw"]
        np.testing.assert_allclose(parts["loss"], one["loss"], rtol=1e-5)


@pytest.mark.slow
def test_checkpoints_are_those_of_one_process(runs):
    one, parts = (final_state(runs / f"sparsity-{name}") for name in ("one", "parts"))
    assert parts.keys() == one.keys()
    for name, tensor in one.items():
        if not name.startswith("optimiser"):
            torch.testing.assert_close(parts[name], tensor, atol=1e-4, rtol=1e-3)


def test_parts_need_as_many_processes(tmp_path):
    alone = SimpleNamespace(num_processes=3, process_index=0, device=torch.device("cpu"))
    with pytest.raises(ArgumentError, match=r"parallel\.sequence=2 needs 2 processes or a multiple, got 3: torchrun"):
        make_layout(alone, ParallelConfig(sequence=2))
    assert make_layout(alone).num_shares == 3
    alone.num_processes = 1
    with pytest.raises(ArgumentError, match=r"parallel\.shard needs processes to share with"):
        make_layout(alone, ParallelConfig(shard=True))
    assert tiny(tmp_path).parallel == ParallelConfig()
