"""From the encoder's output to scores, as in Long Range Arena: a small network on one vector for each sequence."""

from typing import Literal

import torch
from torch import Tensor, nn

from klformer.checks import check_choice, check_count


class ClassifierHead(nn.Sequential):
    """Linear, ReLU or tanh, Linear on one vector: (B, model_dim) -> (B, num_outputs).

    Args:
        model_dim: Size of the vector.
        hidden_dim: Size of the hidden layer.
        num_outputs: Number of scores: classes, or 1 for a regression.
        activation: "relu" or "tanh", after the hidden layer.

    Raises:
        ArgumentError: a size is below 1, or there is no such activation.

    Examples:
        >>> import torch
        >>> from klformer.models import ClassifierHead
        >>> head = ClassifierHead(model_dim=16, hidden_dim=32, num_outputs=3)
        >>> head(torch.randn(4, 16)).shape
        torch.Size([4, 3])
    """

    def __init__(
        self, *, model_dim: int, hidden_dim: int, num_outputs: int, activation: Literal["relu", "tanh"] = "relu"
    ) -> None:
        check_count("hidden_dim", hidden_dim)
        check_count("num_outputs", num_outputs)
        check_choice("activation", activation, ("relu", "tanh"))
        between = nn.ReLU() if activation == "relu" else nn.Tanh()
        super().__init__(nn.Linear(model_dim, hidden_dim), between, nn.Linear(hidden_dim, num_outputs))


#: How many vectors of model_dim the classifier of a pair sees.
PAIR_FEATURES = {"concat": 2, "difference": 3}


class PairClassifierHead(nn.Module):
    """Two vectors through Linear, ReLU, Linear, ReLU, Linear: (B, model_dim) twice -> (B, num_outputs).

    The hidden layers have `hidden_dim` and half of it (512 and 256 in Retrieval).

    Args:
        model_dim: Size of each vector.
        hidden_dim: Size of the first hidden layer.
        num_outputs: Number of scores: classes, or 1 for a regression.
        pair_features: "concat" gives the network both vectors, as in Long Range Arena; "difference" also the absolute
            value of their difference, as in Sentence-BERT, from which a comparison is learned much sooner.

    Raises:
        ArgumentError: a size is too small, or there are no such features.

    Examples:
        >>> import torch
        >>> from klformer.models import PairClassifierHead
        >>> head = PairClassifierHead(model_dim=16, hidden_dim=32, num_outputs=2, pair_features="difference")
        >>> head(torch.randn(4, 16), torch.randn(4, 16)).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        *,
        model_dim: int,
        hidden_dim: int,
        num_outputs: int,
        pair_features: Literal["concat", "difference"] = "concat",
    ) -> None:
        super().__init__()
        check_count("hidden_dim", hidden_dim, minimum=2)
        check_count("num_outputs", num_outputs)
        check_choice("pair_features", pair_features, PAIR_FEATURES)
        self.pair_features = pair_features
        self.layers = nn.Sequential(
            nn.Linear(PAIR_FEATURES[pair_features] * model_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim // 2),
            nn.ReLU(),
            nn.Linear(hidden_dim // 2, num_outputs),
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Scores (B, num_outputs) of the pairs.

        Args:
            first: (B, model_dim), a vector of each first side.
            second: (B, model_dim), a vector of each second side.
        """
        vectors = [first, second]
        if self.pair_features == "difference":
            vectors.append((first - second).abs())
        return self.layers(torch.cat(vectors, dim=-1))
