"""Two processes do what one does."""

import json
import os
import subprocess

import numpy as np
import pytest
import torch
from run_support import final_state, tiny_command, train_command

from klformer.training.checkpoint import CheckpointStore
from klformer.training.log import read_lines


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    plain = ["--model.dropout", "0", "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*train_command(tmp_path, "one"), *plain], check=True, env=environment)
    two = [*train_command(tmp_path, "two", processes=2), *plain]
    subprocess.run([*two, "--training.max-steps", "5"], check=True, env=environment)
    subprocess.run([*two, "--resume"], check=True, env=environment)
    logs = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    losses = [[r["loss"] for r in log if r["kind"] == "train"] for log in logs]
    assert len(losses[0]) == 10
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert results[1]["environment"]["processes"] == 2
    assert results[1]["test"]["num_examples"] == results[0]["test"]["num_examples"]
    states = [final_state(tmp_path / name) for name in ("one", "two")]
    noise = [state["encoder.layers.0.self_attention.mechanism.kernel.spectrum.noise"] for state in states]
    assert torch.equal(*noise), "the frequencies must be drawn alike"


@pytest.mark.slow
def test_two_processes_are_one_with_a_last_batch_of_one(tmp_path):
    # 360 examples: batches of 359 and of 1.
    plain = ["--model.dropout", "0", "--quiet", "--training.batch-size", "359", "--training.max-steps", "6"]
    for name, processes in [("one", 1), ("two", 2)]:
        command = [*train_command(tmp_path, name, processes=processes), *plain]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    logs = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    losses = [[r["loss"] for r in log if r["kind"] == "train"] for log in logs]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


SIGNAL_AFTER_VALIDATION = """
import os, signal, sys
from klformer.cli.main import main
from klformer.training.trainer import Trainer

validate = Trainer._validate

def signalled(self, log):
    validate(self, log)
    if self.accelerator.is_main_process:
        signal.raise_signal(signal.SIGTERM)

Trainer._validate = signalled
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both(tmp_path):
    script = tmp_path / "signalled.py"
    script.write_text(SIGNAL_AFTER_VALIDATION)
    command = train_command(tmp_path, "run", processes=2)
    at = command.index("klformer")
    command[at - 1 : at + 1] = [str(script)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert "stopped after step 4, state saved" in done.stderr
    assert CheckpointStore(tmp_path / "run" / "checkpoints", print).newest("step").step == 4


@pytest.mark.slow
def test_what_one_process_finds_wrong_is_said_once(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    command = train_command(tmp_path, "run", processes=2)
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("holds a run already; --resume goes on with it") == 1
    assert "gloo" not in done.stderr


@pytest.mark.slow
def test_two_processes_compare_and_one_of_them_speaks(tmp_path):
    command = tiny_command(tmp_path, "compare", "--attentions", "linear-elu", "softmax", processes=2)
    for round_ in ("trains", "finds what is done"):
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=True
        )
        assert done.stdout.count("accuracy on the test set") == 1, round_
    assert done.stdout.count("done already") == 2
    results = json.loads((tmp_path / "comparison-sparsity0.5-laptop.json").read_text())
    assert [result["attention"] for result in results] == ["linear-elu", "softmax"]
    assert all(result["environment"]["processes"] == 2 for result in results)
