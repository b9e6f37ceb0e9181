"""A model that guesses hidden tokens: embedding and encoder are a classifier's, the head scores the vocabulary."""

import math

import torch
from torch import Tensor, nn

from klformer.models.classifiers import Model


class MaskedHead(nn.Module):
    """Linear, GELU, LayerNorm, and the scores of all tokens by the embedding itself: (M, model_dim) -> (M, vocab_size).

    Scores are divided by sqrt(model_dim): embeddings have entries of size one. The bias starts as the logarithm of how
    often a token is there, which is all that can be known without looking.

    Args:
        model_dim: Size of a vector.
        log_frequencies: (vocab_size,), of the tokens in the training data.
    """

    def __init__(self, *, model_dim: int, log_frequencies: Tensor) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(model_dim, model_dim), nn.GELU(), nn.LayerNorm(model_dim))
        self.bias = nn.Parameter(log_frequencies.clone())

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Scores by the rows of the embedding (vocab_size, model_dim)."""
        return self.transform(x) @ embedding.T / math.sqrt(embedding.shape[1]) + self.bias


class MaskedLanguageModel(Model):
    """Scores of the vocabulary at some positions of sequences.

    `build_masked` puts one together from a configuration.

    Examples:
        >>> import torch
        >>> from klformer import AttentionSpec
        >>> from klformer.models import InputShape, ModelConfig, build_masked
        >>> shape = InputShape(max_len=50, vocab_size=100)
        >>> model = build_masked(ModelConfig(), AttentionSpec(name="gmm-prf"), shape, counts=torch.ones(100))
        >>> tokens = torch.randint(100, (2, 50))
        >>> asked = torch.zeros(2, 50, dtype=torch.bool)
        >>> asked[:, :3] = True  # three tokens of each sequence
        >>> model(tokens, None, asked).shape, model.encode(tokens).shape
        (torch.Size([6, 100]), torch.Size([2, 64]))
    """

    def forward(self, inputs: Tensor, key_mask: Tensor | None, asked: Tensor) -> Tensor:
        """Scores (M, vocab_size) of the M positions that are asked for, row by row.

        Args:
            inputs: Tokens (B, L).
            key_mask: (B, L), True = keep; None if all are kept.
            asked: (B, L), True = score.
        """
        x, key_mask = self.embedding(inputs, key_mask)
        x = self.encoder(x, key_mask=key_mask)
        if self.embedding.holds_cls:
            x = x[:, 1:]
        assert isinstance(self.embedding.inputs, nn.Embedding)
        return self.head(x[asked], self.embedding.inputs.weight)


def log_frequencies(counts: Tensor) -> Tensor:
    """log of (count + 1) / (total + vocab_size): a token that was never there is as likely as half of one."""
    smooth = counts.double() + 1
    return torch.log(smooth / smooth.sum()).float()
