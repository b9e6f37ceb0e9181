"""Classes and numbers that are judged by other metrics than accuracy and error: F1, Matthews' correlation, and
Pearson's and Spearman's. GLUE asks for them; torchmetrics computes them."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from klformer.lab.training.metrics import Metric
from klformer.lab.training.objectives.classification import Classification
from klformer.lab.training.objectives.regression import Regression

_ACCURACY = Metric("accuracy", higher_is_better=True, percent=True)


class BinaryF1(Classification):
    """Two classes, of which the second is the one to be found.

    F1 is the harmonic mean of precision and recall of that class.

    Examples:
        >>> import torch
        >>> from klformer.lab.training.objectives import BinaryF1
        >>> BinaryF1().measure(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 0, 0]))  # doctest: +ELLIPSIS
        {'accuracy': 0.75, 'f1': 0.666...}
    """

    metrics: ClassVar[Sequence[Metric]] = (_ACCURACY, Metric("f1", higher_is_better=True, percent=True))

    def __init__(self) -> None:
        super().__init__(num_classes=2)

    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        # Imported here, as below: it takes a second, and only these objectives need it.
        from torchmetrics.functional.classification import binary_f1_score

        return super().measure(predictions, targets) | {"f1": binary_f1_score(predictions, targets).item()}


class Matthews(Classification):
    """Two classes of very different sizes, by Matthews' correlation.

    It is 1 if all is right, 0 for guessing, and -1 if all is wrong.

    Examples:
        Always giving the most frequent answer is often right, and worth nothing:

        >>> import torch
        >>> from klformer.lab.training.objectives import Matthews
        >>> Matthews().measure(torch.tensor([1, 1, 1, 1]), torch.tensor([1, 1, 1, 0]))
        {'accuracy': 0.75, 'matthews': 0.0}
    """

    metrics: ClassVar[Sequence[Metric]] = (Metric("matthews", higher_is_better=True), _ACCURACY)

    def __init__(self) -> None:
        super().__init__(num_classes=2)

    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        from torchmetrics.functional.classification import binary_matthews_corrcoef

        value = 0.0
        # Always the same answer is correlated with nothing; the library gives another limit there.
        if (predictions != predictions[0]).any() and (targets != targets[0]).any():
            value = binary_matthews_corrcoef(predictions, targets).item()
        return super().measure(predictions, targets) | {"matthews": value}


class Correlation(Regression):
    """A number, by its correlation with the target.

    Pearson's correlation is that of the numbers, Spearman's that of their ranks.

    Args:
        mean: As in `Regression`.
        scale: As in `Regression`.

    Examples:
        >>> import torch
        >>> from klformer.lab.training.objectives import Correlation
        >>> found = Correlation().measure(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 2.0, 3.0]))
        >>> {name: round(value, 2) for name, value in found.items()}
        {'pearson': 0.92, 'spearman': 1.0, 'mse': 12.0}
    """

    metrics: ClassVar[Sequence[Metric]] = (
        Metric("pearson", higher_is_better=True),
        Metric("spearman", higher_is_better=True),
        Metric("mse", higher_is_better=False),
    )

    def sums(self, outputs: Tensor, batch: object) -> Mapping[str, Tensor]:
        return {}

    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        from torchmetrics.functional import pearson_corrcoef

        given, wanted = predictions.double(), targets.double()
        mse = super().measure(predictions, targets)["mse"]
        if given.std() == 0 or wanted.std() == 0:  # a constant is correlated with nothing
            return {"pearson": 0.0, "spearman": 0.0, "mse": mse}
        return {
            "pearson": pearson_corrcoef(given, wanted).item(),
            # torchmetrics' own function adds up ranks in 32 bits: 100,000 equal targets turn the sign.
            "spearman": pearson_corrcoef(ranks(given), ranks(wanted)).item(),
            "mse": mse,
        }


def ranks(x: Tensor) -> Tensor:
    """Return ranks of numbers (N,) from 1, equal numbers with the mean of theirs, in float64."""
    _, places, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[places]
