"""A tiny run on the sparsity task, and ways to look at it and to disturb it."""

import hashlib
import json
import os
import signal
import sys
from functools import partial

import torch

from klformer.lab.runs.config import ExperimentConfig, preset
from klformer.lab.training.checkpoint import CheckpointStore
from klformer.lab.training.objectives import Classification
from klformer.lab.training.progress import SilentReporter
from klformer.models import AttentionSpec

TINY = {
    "data": {"num_examples": 450, "max_len": 9, "validation_limit": 45, "test_limit": 45},
    "model": {"num_layers": 1, "num_heads": 2, "model_dim": 8, "head_dim": 4, "ffn_dim": 8, "head_hidden_dim": 8},
    "training": {
        "batch_size": 16, "max_steps": 10, "evaluate_every": 4, "checkpoint_every": 3, "log_every": 1,
        "resample_every": 2, "evaluation_draws": 3, "clip_norm": 1.0,
    },
    "schedule": {"kind": "constant", "warmup_steps": 3},
}  # fmt: skip
#: The same as flags of the command line.
TINY_FLAGS = [
    f"--{section}.{key.replace('_', '-')}={value}" for section, values in TINY.items() for key, value in values.items()
]


class Listener(SilentReporter):
    def __init__(self):
        self.said = []

    def say(self, message):
        self.said.append(message)


def tiny(tmp_path, attention="gmm-rks:num_frequencies=8", *, schedule="constant", **training):
    base = preset("laptop", "sparsity", AttentionSpec.parse(attention)).model_dump()
    for section, values in TINY.items():
        base[section] |= values
    base["data"]["root"] = tmp_path / "data"
    base["schedule"]["kind"] = schedule
    base["training"] |= training
    return ExperimentConfig.model_validate(base)


def final_state(folder):
    newest = CheckpointStore(folder / "checkpoints", print).newest("step")
    return newest.weights() | {f"optimiser.{k}": v for k, v in newest.optimiser().items()}


def assert_same_state(first, second):
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different


def without_speed(lines):
    return [{k: v for k, v in line.items() if k not in ("tokens_per_second", "seconds")} for line in lines]


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def damage(checkpoint):
    weights = checkpoint / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def sealed(manifest):
    """The text of a checkpoint's manifest with the checksum that fits it."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"sha256": digest})


def calling_at(number, action, function):
    """`function`, with `action` done just before its call of that number."""
    calls = []

    def wrapper(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            action()
        return function(*args, **kwargs)

    return wrapper


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def tiny_command(tmp_path, command, *options, processes=1):
    """A command of klformer on the sparsity task with runs in `tmp_path`, as a list for subprocess."""
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    return [
        *[sys.executable, *launcher, "-m", "klformer", command, "--task", "sparsity", *options],
        *["--out", str(tmp_path), f"--data.root={tmp_path / 'data'}", *TINY_FLAGS],
    ]


def train_command(tmp_path, name, *, processes=1):
    return tiny_command(
        tmp_path, "train", "--attention", "gmm-rks:num_frequencies=8", "--name", name, processes=processes
    )


def while_training(function):
    """`function(outputs, model, batch)` in the place of the outputs of training batches; evaluation is left alone."""
    outputs = Classification.outputs

    def wrapper(self, model, batch):
        if not model.training:
            return outputs(self, model, batch)
        return function(partial(outputs, self), model, batch)

    return wrapper


def acting_at(number, action):
    """Outputs of training batches as they are, with `action` done just before those of that number."""
    return while_training(calling_at(number, action, lambda outputs, model, batch: outputs(model, batch)))


def poison_gradients(monkeypatch, at):
    """From outputs that are finite come gradients that are not, in one call."""
    calls = []

    def poisoned(outputs, model, batch):
        calls.append(batch)
        nothing = (0 * next(model.parameters())).sum().abs().sqrt() if len(calls) == at else 0.0
        return outputs(model, batch) + nothing

    monkeypatch.setattr(Classification, "outputs", while_training(poisoned))
    return calls
