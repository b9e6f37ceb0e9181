"""What a task is: labelled sequences in three splits, and the protocol that makes the splits.

A task reads the parts that its data comes in. Where no validation set comes with the data, the protocol makes one:

- "lra": validation is the test set, as Long Range Arena does it for text. The model is selected on what it is
  reported on.
- "holdout": validation is a seeded random part of the training set; the test set is used once, at the end.

Where the data has an official validation set (listops, retrieval), both protocols use it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import numpy as np

from klformer.checks import check_choice
from klformer.data.sequences import Examples
from klformer.errors import ArgumentError, DataError
from klformer.registry import Registry
from klformer.tasks.config import DataConfig, Split
from klformer.tasks.files import exists, is_folder

#: Distinct streams of random numbers for one seed.
_HOLDOUT_STREAM, _LIMIT_STREAM = 1, 2


class Task(ABC):
    """A classification task over sequences or pairs of them.

    Args:
        config: Where the data is and how it is split.
        quiet: Say nothing while generating.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    num_classes: ClassVar[int]
    #: Number of token ids; None if positions are vectors.
    vocab_size: ClassVar[int | None] = None
    #: Size of the vectors; None if positions are token ids.
    input_dim: ClassVar[int | None] = None
    is_pair: ClassVar[bool] = False
    #: Whether the data can be generated, so that `num_examples` has a meaning.
    is_generated: ClassVar[bool] = False
    default_max_len: ClassVar[int]
    #: Examples of the official files, by part.
    official_sizes: ClassVar[Mapping[Split, int]] = MappingProxyType({})

    def __init__(self, config: DataConfig, *, quiet: bool = False) -> None:
        if config.num_examples is not None and not self.is_generated:
            raise ArgumentError(f"num_examples is for generated tasks, {self.name} is read from files; use train_limit")
        self.config = config
        self.quiet = quiet
        self.root = config.folder()
        self.max_len = config.max_len or self.default_max_len
        #: Examples of every part that was read.
        self.sizes: dict[Split, int] = {}

    @abstractmethod
    def location(self) -> str:
        """Where the data is read from, or will be generated to."""

    @abstractmethod
    def _read(self, part: Split) -> Examples:
        """A part as the data has it, all of it."""

    def prepare(self) -> None:  # noqa: B027 - most tasks have nothing to prepare
        """Make sure that generated data exists. With several processes, call it in one of them first."""

    def load(self, split: Split) -> Examples:
        """The examples of a split, after the protocol and the limit.

        Raises:
            DataError: data is missing, malformed or fewer than the limit.
        """
        check_choice("split", split, get_args(Split))
        if exists(self.root) and not is_folder(self.root):
            raise DataError("is no folder; data.root must be the folder that the data is in", file=self.root)
        examples = self._select(split)
        limit = self.config.limit(split)
        if limit is None:
            return examples
        if limit > len(examples):
            raise DataError(f"{split}_limit is {limit}, but there are {len(examples)} examples in {self.location()}")
        generator = np.random.default_rng((self.config.seed, _LIMIT_STREAM, get_args(Split).index(split)))
        return examples.take(np.sort(generator.permutation(len(examples))[:limit]))

    def validation_source(self) -> Literal["file", "train", "test"]:
        """What validation is made of: its own file, a part of train that is held out, or test."""
        return "test" if self.config.protocol == "lra" else "train"

    def describe_protocol(self) -> str:
        """One line for reports: what the model is selected on."""
        source = self.validation_source()
        if source == "file":
            return "validation set of the data; test set used once, at the end"
        if source == "test":
            return "validation on the test set (protocol lra)"
        part = f"{self._holdout_fraction():.0%} of the training set (protocol {self.config.protocol})"
        return f"validation on {part}; test set used once, at the end"

    def is_official(self) -> bool:
        """Whether the data is in the files that `official_sizes` speaks of."""
        return True

    def notes(self) -> list[str]:
        """Notes for the user: a sentence for each part that was read and has another size than the official file, as it
        may be cut, and whatever else a task finds worth saying of its files."""
        if not self.is_official():
            return []
        return [
            f"{part} has {size:,} examples, the official data {self.official_sizes[part]:,}: {self.location()}"
            for part, size in self.sizes.items()
            if part in self.official_sizes and size != self.official_sizes[part]
        ]

    def _holdout_fraction(self) -> float:
        return self.config.holdout_fraction

    def _select(self, split: Split) -> Examples:
        source = self.validation_source()
        if split == "test" or source == "file":
            return self._read_part(split)
        if source == "test":
            return self._read_part("test" if split == "validation" else "train")
        examples = self._read_part("train")
        held_out = max(1, round(self._holdout_fraction() * len(examples)))
        if held_out >= len(examples):
            raise DataError(
                f"{len(examples)} training examples are too few to hold out {held_out} of them: {self.location()}"
            )
        order = np.random.default_rng((self.config.seed, _HOLDOUT_STREAM)).permutation(len(examples))
        return examples.take(np.sort(order[-held_out:] if split == "validation" else order[:-held_out]))

    def _read_part(self, part: Split) -> Examples:
        examples = self._read(part)
        self.sizes[part] = len(examples)
        return examples


TASKS: Registry[type[Task]] = Registry("task")


def task_names() -> list[str]:
    """The names of all tasks."""
    return list(TASKS)


def build_task(name: str, config: DataConfig, *, quiet: bool = False) -> Task:
    """The task of that name.

    Raises:
        ValueError: there is no such task, or the configuration does not fit it.
    """
    return TASKS[name](config, quiet=quiet)
