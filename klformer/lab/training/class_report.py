"""What there is to say of predicted classes beyond accuracy: which are mistaken for which, F1, and whether
probabilities are what they say. A few sums; libraries that have them take seconds to load, at the end of every run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Larger tables are for nobody to read.
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
        """From probabilities (N, K) and classes (N,)."""
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
        """For a result."""
        return {
            "macro_f1": self.f1.mean().item(),
            "f1_by_class": self.f1.tolist(),
            "calibration_error": self.calibration_error,
            "confusion": self.confusion.tolist(),
        }


def commonest_share(details: Mapping[str, Any]) -> float:
    """The share of the commonest class, which is the accuracy of somebody who says nothing else; from `as_dict`."""
    counts = [sum(row) for row in details["confusion"]]
    return max(counts) / sum(counts)
