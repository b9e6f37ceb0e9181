"""One of several classes for every sequence, or every pair: cross-entropy, accuracy, and a majority vote of draws."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.lab.data import Batch
from klformer.lab.training.metrics import MOST_CLASSES, ClassReport, Metric
from klformer.lab.training.objective import Objective


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute -log p(label), summed over examples.

    Args:
        scores: (B, K), of K classes; or (n, B, K), of n draws.
        labels: (B,), from 0 to K - 1.

    Returns:
        A scalar; or (n,), one for each draw.

    Raises:
        IndexError: a label is no class.

    Examples:
        >>> import torch
        >>> from klformer.lab.training.objectives import cross_entropy
        >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 2]))  # 3 log 4
        tensor(4.1589)
        >>> cross_entropy(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2]))
        tensor([4.1589, 4.1589])
    """
    if scores.dim() == 2:
        return nn.functional.cross_entropy(scores, labels, reduction="sum")
    wanted = labels.expand(len(scores), -1)
    return nn.functional.cross_entropy(scores.movedim(-1, 1), wanted, reduction="none").sum(1)


class Classification(Objective):
    """Class scores, of which the highest is the prediction.

    Args:
        num_classes: Number of classes; targets are 0 to num_classes - 1.

    Raises:
        ArgumentError: there are fewer than two classes.

    Examples:
        >>> import torch
        >>> from klformer.lab.training.objectives import Classification
        >>> objective = Classification(num_classes=3)
        >>> objective.selecting.name, objective.num_outputs
        ('accuracy', 3)
        >>> objective.measure(torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 1, 0]))
        {'accuracy': 0.75}
        >>> objective.combine(torch.tensor([[0, 2], [1, 2], [1, 0]])).tolist()  # the vote of three draws
        [1, 2]
    """

    metrics: ClassVar[Sequence[Metric]] = (Metric("accuracy", higher_is_better=True, percent=True),)
    prediction_dtype: ClassVar[torch.dtype] = torch.long
    combination: ClassVar[str] = "voting"

    def __init__(self, *, num_classes: int) -> None:
        check_count("num_classes", num_classes, minimum=2)
        self.num_classes = num_classes

    @property
    def num_outputs(self) -> int:
        return self.num_classes

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch.targets)

    def sums(self, outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        return {"accuracy": (outputs.argmax(-1) == batch.targets).sum()}

    def predict(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.argmax(-1)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    @property
    def has_details(self) -> bool:
        return self.num_classes <= MOST_CLASSES

    def details(self, answers: Tensor, targets: Tensor) -> dict[str, Any]:
        return ClassReport.of(answers, targets).as_dict()

    def measure(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        return {"accuracy": (predictions == targets).float().mean().item()}

    def combine(self, predictions: Tensor) -> Tensor:
        return nn.functional.one_hot(predictions, self.num_classes).sum(0).argmax(-1)

    def check_targets(self, targets: Tensor) -> None:
        if targets.dtype != torch.long or ((targets < 0) | (targets >= self.num_classes)).any():
            raise ArgumentError(
                f"targets of {self.num_classes} classes must be int64 from 0 to {self.num_classes - 1}, got "
                f"{targets.dtype} from {targets.min().item()} to {targets.max().item()}"
            )
