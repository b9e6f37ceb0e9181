"""Runs whose sequences are in parts, beside the same run in one process; in a folder that is given."""

import sys
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # what every run imports when it needs it is imported once, here
import torch.utils.tensorboard
from fork_support import as_torchrun, codes_of, forked
from run_support import tiny

from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.runs.train import train_run
from klformer.lab.training.processes import leave_processes
from klformer.lab.training.progress import SilentReporter

#: Tasks with outputs of whole sequences and of positions.
TASKS = {
    "sparsity": {},
    "recall": {"form": "causal", "num_pairs": 3, "num_symbols": 8, "num_queries": 2, "num_examples": 200},
}


def config(folder, task, *, steps, **parallel):
    base = tiny(folder, "gmm-prf:num_frequencies=8", max_steps=steps).model_dump()
    base["model"] |= {"dropout": 0.0, "num_layers": 2}
    base["training"] |= {"evaluate_every": 25 if task == "sparsity" else 5, "evaluation_draws": 2}
    base["task"], base["parallel"] = task, parallel
    if task != "sparsity":
        base["data"] = {"root": folder / "data", **TASKS[task]}
    return ExperimentConfig.model_validate(base)


def train(folder, task, name, *, steps, resume=False, **parallel):
    torch.set_num_threads(1)
    chosen = config(folder, task, steps=steps, **parallel)
    train_run(chosen, folder / f"{task}-{name}", resume=resume, reporter=SilentReporter())
    leave_processes()


def main():
    folder = Path(sys.argv[1])
    for task, steps in (("sparsity", 50), ("recall", 10)):
        alone = forked(lambda _, task=task, steps=steps: train(folder, task, "one", steps=steps), 1)
        half = partial(train, folder, task, "parts", steps=steps // 2, sequence=2)
        assert codes_of(alone) + codes_of(as_torchrun(half, 2)) == [0] * 3
        # On with another number of processes: two share the examples, and each of these is two with half a sequence.
        rest = partial(train, folder, task, "parts", steps=steps, sequence=2, resume=True)
        world = 4 if task == "sparsity" else 2
        assert codes_of(as_torchrun(rest, world)) == [0] * world
    # Weights that are shared out as well, and one process that goes on with them.
    half = partial(train, folder, "recall", "shards", steps=5, sequence=2, shard=True)
    assert codes_of(as_torchrun(half, 2)) == [0, 0]
    assert codes_of(forked(lambda _: train(folder, "recall", "shards", steps=10, resume=True), 1)) == [0]


if __name__ == "__main__":
    main()
