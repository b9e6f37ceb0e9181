"""Inputs without data: for benchmarks and profiles, which need the shapes of a task and nothing else."""

import numpy as np
import torch

from klformer.lab.data import Batch, Examples, Sequences, collate
from klformer.lab.tasks.base import Task


def random_batch(task: Task, batch_size: int, length: int) -> Batch:
    """Random inputs of one length, in the form of the task."""
    generator = np.random.default_rng(0)
    form = task.shape()
    size = (batch_size, length) if form.vocab_size is not None else (batch_size, length, form.input_dim or 1)
    high = form.vocab_size or 2

    def sequences() -> Sequences:
        return Sequences.from_matrix(generator.integers(0, high, size))

    objective = task.objective()
    # Any target takes as long as any other.
    targets = torch.zeros(batch_size, *objective.prediction_shape, dtype=objective.prediction_dtype).numpy()
    examples = Examples(sequences(), targets, sequences() if form.is_pair else None)
    return collate(examples, np.arange(batch_size))
