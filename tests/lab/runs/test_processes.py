"""Two processes do what one does."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from run_support import assert_same_state, final_state, tiny_command, train_command

from klformer.lab.training.checkpoint import CheckpointStore
from klformer.lab.training.log import read_lines


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


@pytest.mark.slow
def test_two_processes_pretrain_as_one(tmp_path):
    """The same tokens are hidden, and every hidden token counts the same: one process or two, killed or not."""
    (tmp_path / "book.txt").write_text("one two three\nwords and other words\n" * 90)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KLFORMER_DATA": str(tmp_path / "cache")}
    sizes = {"num_layers": 1, "num_heads": 2, "model_dim": 8, "head_dim": 4, "ffn_dim": 8}
    flags = [f"--model.{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    flags += ["--training.evaluate-every=10", "--training.checkpoint-every=3", "--training.log-every=1", "--quiet"]
    flags += ["--attention=gmm-rks:num_frequencies=8", "--data.max-len=16", "--data.tokens.vocab-size=60"]
    flags += [f"--data.train={tmp_path / 'book.txt'}", f"--out={tmp_path}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def pretrain(name, steps, *more, launcher=(), program=("-m", "klformer")):
        command = [sys.executable, *launcher, *program, "pretrain", *flags, f"--name={name}"]
        command += [f"--training.max-steps={steps}", *more]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert pretrain("one", 10).returncode == 0
    assert pretrain("two", 5, launcher=torchrun).returncode == 0
    assert pretrain("two", 10, "--resume", launcher=torchrun).returncode == 0
    assert pretrain("killed", 10, program=("-c", KILLED_AT_STEP_8)).returncode == -signal.SIGKILL
    assert pretrain("killed", 10, "--resume").returncode == 0
    results = {name: json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two", "killed")}
    assert results["two"]["environment"]["processes"] == 2
    losses = {name: [line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl") if line["kind"] == "train"]
              for name in results}  # fmt: skip
    assert len(losses["one"]) == 10
    np.testing.assert_allclose(losses["two"], losses["one"], rtol=1e-4)
    np.testing.assert_allclose(results["two"]["test"]["perplexity"], results["one"]["test"]["perplexity"], rtol=1e-4)
    assert losses["killed"] == losses["one"]
    assert_same_state(final_state(tmp_path / "killed"), final_state(tmp_path / "one"))


KILLED_AT_STEP_8 = """
import os, signal, sys
from klformer.lab.cli.main import main
from klformer.lab.training.step import Stepper

step, done = Stepper.step, []

def killed(self, indices, draw):
    done.append(1)
    if len(done) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, indices, draw)

Stepper.step = killed
main(sys.argv[1:])
"""

SIGNAL_AFTER_VALIDATION = """
import os, signal, sys
from klformer.lab.cli.main import main
from klformer.lab.training.trainer import Trainer

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
