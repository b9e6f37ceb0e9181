"""What a user can choose about the data of any task. What one task alone has is a subclass beside it."""

import os
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field

from klformer.checks import check_choice
from klformer.config import Config

Split = Literal["train", "validation", "test"]
SomeConfig = TypeVar("SomeConfig", bound=Config)


class DataConfig(Config):
    """Where the data is, how it is split and how much of it is used.

    Raises:
        ArgumentError: a value is not allowed.

    Examples:
        >>> from klformer.lab.tasks import DataConfig
        >>> config = DataConfig(root="data", protocol="lra", train_limit=1000)
        >>> config.folder().name, config.limit("train"), config.limit("test")
        ('data', 1000, None)
        >>> config.absolute().root.is_absolute()
        True
    """

    root: Path | None = None
    """Folder of the data. Default: the environment variable KLFORMER_DATA, else klformer in the user's cache folder."""

    protocol: Literal["lra", "holdout"] = "holdout"
    """Where there is no official validation set: "lra" selects on the test set, as Long Range Arena does for text;
    "holdout" selects on a part of the training set and uses the test set once, at the end."""

    holdout_fraction: float = Field(0.1, gt=0, lt=1)
    """Part of the training set that is held out for validation by the protocol "holdout"."""

    stratified: bool = False
    """Hold out the same part of every class."""

    max_len: int | None = Field(None, ge=1)
    """Longest sequence: longer ones are cut, and generated ones are made this long at most. Default: the task's own."""

    train_limit: int | None = Field(None, ge=1)
    """Train on a random subset of so many examples."""

    validation_limit: int | None = Field(None, ge=1)
    """Validate on a random subset of so many examples."""

    test_limit: int | None = Field(None, ge=1)
    """Test on a random subset of so many examples."""

    seed: int = Field(0, ge=0)
    """Seed of generated data, of the part that is held out and of random subsets."""

    def folder(self) -> Path:
        """Return the folder of the data: `root`, else KLFORMER_DATA, else klformer in the cache folder."""
        if self.root is not None:
            return self.root.expanduser()
        if chosen := os.environ.get("KLFORMER_DATA"):
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "klformer"

    def absolute(self) -> Self:
        """Return the same with absolute paths: a run is to find its data from any other folder."""
        return _absolute(self)

    def limit(self, split: Split) -> int | None:
        """Return the size of the random subset of a split; None for all of it.

        Args:
            split: "train", "validation" or "test".

        Raises:
            ArgumentError: there is no such split.
        """
        limits = {"train": self.train_limit, "validation": self.validation_limit, "test": self.test_limit}
        check_choice("split", split, limits)
        return limits[split]


def _absolute(config: SomeConfig) -> SomeConfig:
    changed: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Path):
            changed[name] = value.expanduser().absolute()
        elif isinstance(value, Config):
            changed[name] = _absolute(value)
    return config.model_copy(update=changed)


class GeneratedData(DataConfig):
    """Data that is generated, where it is not read.

    Raises:
        ArgumentError: a value is not allowed.

    Examples:
        >>> from klformer.lab.tasks import GeneratedData
        >>> config = GeneratedData(num_examples=1000, max_len=100, seed=7)
        >>> config.num_examples, config.max_len
        (1000, 100)
    """

    num_examples: int | None = Field(None, ge=1)
    """How many examples to generate (sparsity: in all, default 200000; listops: for training, default 96000)."""
