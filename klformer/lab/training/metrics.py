"""What a metric is called, which way is better, and how it is written; and the report on classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Larger tables are too large to read.
MOST_CLASSES = 50
BINS = 15


@dataclass(frozen=True, eq=False)
class ClassReport:
    """Of a split, with the mean of the draws' probabilities.

    Args:
        confusion: (K, K), how often a class (row) was taken for another (column).
        f1: (K,), the harmonic mean of precision and recall of each class; 0 where a class was neither there nor said.
        calibration_error: The mean distance of probability and accuracy, over bins of the probability of what was said,
            weighed by how many fall into each.
    """

    confusion: Tensor
    f1: Tensor
    calibration_error: float

    @staticmethod
    def of(probabilities: Tensor, targets: Tensor) -> "ClassReport":
        """Make the report from probabilities (N, K) and classes (N,)."""
        classes = probabilities.shape[1]
        sure, said = probabilities.max(1)
        confusion = torch.bincount(targets * classes + said, minlength=classes**2).view(classes, classes)
        seen = confusion.sum(0) + confusion.sum(1)
        f1 = torch.where(seen > 0, 2 * confusion.diagonal() / seen.clamp(min=1), 0.0)
        bins = (sure * BINS).long().clamp(max=BINS - 1)
        # In each bin: the sum of probabilities less the number of right ones.
        gaps = torch.zeros(BINS, dtype=torch.float64, device=sure.device)
        gaps.index_add_(0, bins, sure.double() - (said == targets).double())
        return ClassReport(confusion, f1, (gaps.abs().sum() / len(targets)).item())

    def as_dict(self) -> dict[str, Any]:
        """Return it as a result has it."""
        return {
            "macro_f1": self.f1.mean().item(),
            "f1_by_class": self.f1.tolist(),
            "calibration_error": self.calibration_error,
            "confusion": self.confusion.tolist(),
        }


def largest_share(details: Mapping[str, Any]) -> float:
    """Return the share of the most frequent class, from `as_dict`: the accuracy of always predicting it."""
    counts = [sum(row) for row in details["confusion"]]
    return max(counts) / sum(counts)


@dataclass(frozen=True)
class Metric:
    """A number by which models are compared."""

    name: str
    higher_is_better: bool
    percent: bool = False

    def rank(self, value: float) -> float:
        """Return a number that is higher for the better of two values."""
        return value if self.higher_is_better else -value

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is as good as the target, or better."""
        return self.rank(value) >= self.rank(target)

    def show(self, value: float, digits: int = 2) -> str:
        """Write a value for people: in percent with so many digits, or as a number of two more significant ones."""
        return f"{100 * value:.{digits}f}%" if self.percent else f"{value:.{digits + 2}g}"

    @property
    def label(self) -> str:
        """The name with its unit, for headings and axes."""
        return f"{self.name}, %" if self.percent else self.name

    def best(self, values: Sequence[float]) -> float:
        """Return the best of some values."""
        return max(values, key=self.rank)

    def scaled(self, value: float) -> float:
        """Return a value in the unit in which people read it."""
        return 100 * value if self.percent else value

    def show_scaled(self, scaled: float) -> str:
        """Write a scaled value as tables have it, whose heading has the unit."""
        return f"{scaled:.2f}" if self.percent else f"{scaled:.4g}"

    def show_spread(self, value: float) -> str:
        """Write a deviation, without the sign of percent."""
        return f"{100 * value:.2f}" if self.percent else f"{value:.2g}"

    def as_dict(self) -> dict[str, str | bool]:
        return {"name": self.name, "higher_is_better": self.higher_is_better, "percent": self.percent}
