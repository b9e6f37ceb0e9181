"""Inputs without data: for benchmarks and profiles, which need the shapes of a task and nothing else."""

import numpy as np

from klformer.data import Batch, Examples, Sequences, collate
from klformer.tasks.base import Task


def random_batch(task: Task, batch_size: int, length: int) -> Batch:
    """Random inputs of one length, in the form of the task."""
    generator = np.random.default_rng(0)
    shape = (batch_size, length) if task.vocab_size is not None else (batch_size, length, task.input_dim or 1)
    high = task.vocab_size or 2

    def sequences() -> Sequences:
        return Sequences.from_matrix(generator.integers(0, high, shape))

    targets = task.objective().random_targets(generator, batch_size)
    examples = Examples(sequences(), targets, sequences() if task.is_pair else None)
    return collate(examples, np.arange(batch_size))
