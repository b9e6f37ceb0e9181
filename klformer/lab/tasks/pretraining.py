"""Any task of tokens without its labels: hidden tokens of its own sequences are to be guessed.

The model has the task's shape, and one token more for the mask where the task has none, so that its embedding and its
encoder can be taken over by a model of the task itself.
"""

import math
from dataclasses import replace

import numpy as np

from klformer.errors import ArgumentError
from klformer.lab.data import Examples, InputShape, Sequences
from klformer.lab.data.sequences import AnyArray
from klformer.lab.tasks.base import Knowledge, Task
from klformer.lab.tasks.config import Split
from klformer.lab.training.objectives import MaskedLanguageModelling
from klformer.memory import release


class Pretraining(Task):
    """The sequences of another task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.name, self.default_max_len = task.name, task.default_max_len  # type: ignore[misc]
        super().__init__(task.config, quiet=task.quiet)
        self._counts: AnyArray | None = None
        #: Accuracy and perplexity by the frequency of tokens alone, on validation.
        self.unigram: dict[str, float] = {}

    def label(self) -> str:
        return f"{self.task.label()}, masked"

    def detail(self) -> str:
        return f"{self.task.detail()} masked".strip()

    def location(self) -> str:
        return self.task.location()

    def prepare(self) -> None:
        self.task.prepare()

    def adopt(self, knowledge: Knowledge) -> None:
        self.task.adopt(knowledge)

    def learn(self) -> Knowledge:
        """Return what the task learns, and how often each token is there in training."""
        knowledge = self.task.learn()
        self.task.know(knowledge)
        counts = self._count(self.load("train"))
        asked = _frequency(self.load("validation"), len(counts)) * ~self._is_special()
        likely = (counts + 1) / (counts + 1).sum()
        loss = -(asked * np.log(likely)).sum() / max(1, asked.sum())
        unigram = {
            "masked_accuracy": float(asked[counts.argmax()] / max(1, asked.sum())),
            "perplexity": float(math.exp(min(700.0, loss))),
        }
        return {**knowledge, "counts": counts.tolist(), "unigram": unigram}

    def know(self, knowledge: Knowledge) -> None:
        self.task.know(knowledge)
        if "counts" in knowledge:
            self._counts = np.asarray(knowledge["counts"], np.int64)
            self.unigram = dict(knowledge["unigram"])

    def shape(self) -> InputShape:
        shape = self.task.shape()
        if shape.vocab_size is None:
            raise ArgumentError(f"{self.task.name} has vectors, not tokens; only tokens can be hidden and guessed")
        if shape.mask is None:
            shape = replace(shape, vocab_size=shape.vocab_size + 1, mask=shape.vocab_size)
        return replace(shape, is_pair=False)

    def objective(self) -> MaskedLanguageModelling:
        shape = self.shape()
        assert shape.vocab_size is not None
        assert shape.mask is not None
        if self._counts is None:
            self.know(self.learn())
        assert self._counts is not None
        return MaskedLanguageModelling(
            vocab_size=shape.vocab_size, mask=shape.mask, specials=shape.specials, counts=self._counts
        )

    def guess(self) -> float | None:
        """Return the accuracy of the most frequent token of training, for every hidden token of validation."""
        return self.unigram.get("masked_accuracy")

    def read(self, part: Split) -> Examples:
        return self.task.read(part)

    def load(self, split: Split) -> Examples:
        examples = self.task.load(split)
        sides = [examples.first] if examples.second is None else [examples.first, examples.second]
        sequences = sides[0] if len(sides) == 1 else _one_after_the_other(*sides)
        return Examples(sequences, np.zeros(len(sequences), np.int64))

    def describe_protocol(self) -> str:
        return self.task.describe_protocol()

    def notes(self) -> list[str]:
        if not self.unigram:
            return self.task.notes()
        accuracy, perplexity = self.unigram["masked_accuracy"], self.unigram["perplexity"]
        said = f"by the frequency of tokens alone: masked accuracy {accuracy:.2%}, perplexity {perplexity:.4g}"
        return [*self.task.notes(), said]

    def facts(self) -> dict[str, dict[str, float]]:
        return {"unigram": self.unigram}

    def _is_special(self) -> AnyArray:
        shape = self.shape()
        special = np.zeros(shape.vocab_size or 0, bool)
        special[[shape.mask or 0, *shape.specials]] = True
        return special

    def _count(self, examples: Examples) -> AnyArray:
        """Count how often each token that may be asked for is there."""
        counts = _frequency(examples, self.shape().vocab_size or 0)
        counts[self._is_special()] = 0
        return counts


def _frequency(examples: Examples, vocab_size: int) -> AnyArray:
    """Count how often each token is there; some at a time, as there may be more than fit in memory."""
    values, step = examples.first.values, 1 << 22
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(values), step):
        counts += np.bincount(values[start : start + step], minlength=vocab_size)
        release(values)
    return counts


def _one_after_the_other(first: Sequences, second: Sequences) -> Sequences:
    offsets = np.concatenate([first.offsets, first.offsets[-1] + second.offsets[1:]])
    return Sequences(np.concatenate([first.values, second.values]), offsets)
