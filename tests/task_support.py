"""Tasks as somebody else would write them: one of classes, one of numbers."""

import numpy as np

from klformer.lab.data import Examples, Sequences
from klformer.lab.tasks import Task
from klformer.lab.training.objectives import Regression


class Parity(Task):
    name, title, summary = "parity", "Parity", "is the number of ones odd"
    num_classes, vocab_size, default_max_len = 2, 3, 9

    def read(self, part):
        size = {"train": 200, "test": 40}[part]
        bits = np.random.default_rng((self.config.seed, size)).integers(1, 3, (size, self.max_len))
        return Examples(Sequences.from_matrix(bits), (bits == 2).sum(1) % 2)


class Share(Parity):
    """A number instead of a class."""

    name, title, summary = "share", "Share", "the share of ones"

    def objective(self):
        return Regression()

    def read(self, part):
        bits = super().read(part).first
        return Examples(bits, (bits.values.reshape(len(bits), -1) == 2).mean(1))
