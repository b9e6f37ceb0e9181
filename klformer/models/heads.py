"""From the encoder's output to class scores, as in Long Range Arena: a small network on the CLS position."""

import torch
from torch import Tensor, nn

from klformer.checks import check_count


class ClassifierHead(nn.Sequential):
    """Linear, ReLU, Linear on one vector: (B, model_dim) -> (B, num_classes)."""

    def __init__(self, *, model_dim: int, hidden_dim: int, num_classes: int) -> None:
        check_count("hidden_dim", hidden_dim)
        check_count("num_classes", num_classes, minimum=2)
        super().__init__(nn.Linear(model_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_classes))


class PairClassifierHead(nn.Module):
    """Two vectors, concatenated, through Linear, ReLU, Linear, ReLU, Linear: (B, model_dim) twice -> (B, num_classes).

    The hidden layers have `hidden_dim` and half of it (512 and 256 in Retrieval).
    """

    def __init__(self, *, model_dim: int, hidden_dim: int, num_classes: int) -> None:
        super().__init__()
        check_count("hidden_dim", hidden_dim, minimum=2)
        check_count("num_classes", num_classes, minimum=2)
        self.layers = nn.Sequential(
            nn.Linear(2 * model_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim // 2),
            nn.ReLU(),
            nn.Linear(hidden_dim // 2, num_classes),
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Scores (B, num_classes) of the pairs."""
        return self.layers(torch.cat([first, second], dim=-1))
