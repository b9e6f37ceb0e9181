"""What is to be learned of somebody's own data: one of some classes with names, or a number."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from klformer.errors import RunError
from klformer.lab.data.sequences import AnyArray
from klformer.lab.training.objective import Objective
from klformer.lab.training.objectives import Classification, Regression

TargetKind = Literal["classes", "number"]
#: More classes than this are rather numbers, or texts.
MOST_CLASSES = 1000


class Targets(ABC):
    """From the label of a row to a target. `encode` raises ValueError with what is wrong with a label."""

    @abstractmethod
    def objective(self) -> Objective:
        """Return what is learned."""

    @abstractmethod
    def encode(self, label: str) -> float:
        """Return a label as a target."""

    @abstractmethod
    def as_array(self, targets: Sequence[float]) -> AnyArray:
        """Return targets in the type of the objective."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return all that `targets_from_json` needs."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the classes; None if targets are numbers."""
        return None

    @property
    def guess(self) -> float | None:
        """The selecting metric of always predicting the same, if that is known."""
        return None


class Classes(Targets):
    """One of some classes."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = dict(counts)
        self._numbers = {name: number for number, name in enumerate(self.counts)}

    @staticmethod
    def learn(labels: Sequence[str]) -> "Classes":
        """Find the classes of some labels: numbers in their own order, words in the alphabet's."""
        counts = Counter(labels)
        if len(counts) < 2:
            raise ValueError(f"must have two classes or more, got only {next(iter(counts))!r}")
        if len(counts) > MOST_CLASSES or (len(counts) > 20 and len(counts) > len(labels) / 2):
            raise ValueError(
                f"has {len(counts):,} different labels in {len(labels):,} rows; for numbers give --data.target number"
            )
        return Classes({name: counts[name] for name in sorted(counts, key=_order)})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @property
    def guess(self) -> float:
        return max(self.counts.values()) / max(1, sum(self.counts.values()))

    def objective(self) -> Objective:
        return Classification(num_classes=len(self.counts))

    def encode(self, label: str) -> float:
        if label not in self._numbers:
            known = ", ".join(map(repr, self.names[:20])) + (", ..." if len(self.names) > 20 else "")
            raise ValueError(f"the label {label!r} is not in the training rows; theirs are {known}")
        return self._numbers[label]

    def as_array(self, targets: Sequence[float]) -> AnyArray:
        return np.asarray(targets, np.int64)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "classes", "counts": self.counts}


class Number(Targets):
    """A number; the model learns it less its mean and over its deviation in training."""

    def __init__(self, mean: float, scale: float) -> None:
        self.mean, self.scale = mean, scale

    @staticmethod
    def learn(labels: Sequence[str]) -> "Number":
        """Compute mean and deviation of some labels. Raises ValueError if one is not a number."""
        values = np.array([number_of(label) for label in labels])
        return Number(float(values.mean()), float(values.std()) or 1.0)

    def objective(self) -> Objective:
        return Regression(mean=self.mean, scale=self.scale)

    def encode(self, label: str) -> float:
        return number_of(label)

    def as_array(self, targets: Sequence[float]) -> AnyArray:
        return np.asarray(targets, np.float64)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "number", "mean": self.mean, "scale": self.scale}


def learn_targets(kind: TargetKind, labels: Sequence[str]) -> Targets:
    """Learn classes or numbers, as the labels of the training rows have them. Raises ValueError if they do not."""
    return Classes.learn(labels) if kind == "classes" else Number.learn(labels)


def targets_from_json(content: Mapping[str, Any]) -> Targets:
    """Make the targets that `as_json` describes."""
    try:
        if content["kind"] == "classes":
            return Classes(content["counts"])
        return Number(content["mean"], content["scale"])
    except (KeyError, TypeError) as error:
        raise RunError(f"what the run remembers of its labels is damaged: {error}") from error


def label_text(value: Any) -> str:
    """Return a label as text: what csv has, or what other files hold, whole numbers without a point."""
    if value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip():
        raise ValueError("the label is empty")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def number_of(label: str) -> float:
    """Return a label as a number. Raises ValueError if it is none."""
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"the label must be a finite number, got {label!r}; --data.target classes takes words")
    return value


def _order(name: str) -> tuple[float, str]:
    try:
        return (float(name), name)
    except ValueError:
        return (math.inf, name)
