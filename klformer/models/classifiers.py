"""Whole models: embedding, encoder and head put together."""

from torch import Tensor, nn

from klformer.models.embeddings import SequenceEmbedding
from klformer.models.heads import ClassifierHead, PairClassifierHead
from klformer.models.pooling import sequence_vectors
from klformer.models.transformer import TransformerDecoder, TransformerEncoder


class SequenceClassifier(nn.Module):
    """Scores of a sequence, read off its CLS position, or off the mean over its tokens if there is no CLS.

    `build_classifier` puts one together from a configuration.

    Args:
        embedding: From tokens or vectors to inputs of the encoder.
        encoder: Layers of the model's size.
        head: From one vector to the scores.

    Examples:
        >>> import torch
        >>> from klformer.models import (
        ...     ClassifierHead, EncoderConfig, SequenceClassifier, SequenceEmbedding, TransformerEncoder
        ... )
        >>> model = SequenceClassifier(
        ...     SequenceEmbedding(model_dim=16, max_len=50, vocab_size=100),
        ...     TransformerEncoder(EncoderConfig(model_dim=16, num_layers=1, num_heads=2)),
        ...     ClassifierHead(model_dim=16, hidden_dim=32, num_outputs=3),
        ... )
        >>> tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
        >>> key_mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
        >>> model(tokens, key_mask).shape
        torch.Size([2, 3])
    """

    def __init__(self, embedding: SequenceEmbedding, encoder: TransformerEncoder, head: ClassifierHead) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Scores (B, num_outputs).

        Args:
            inputs: Tokens (B, L) or vectors (B, L, input_dim).
            key_mask: (B, L), True = keep.
        """
        return self.head(sequence_vectors(self.embedding, self.encoder, inputs, key_mask))


class PositionClassifier(nn.Module):
    """Scores of every position of a sequence, by an encoder, or by a decoder that sees the past only.

    Args:
        embedding: From tokens or vectors to inputs of the encoder; without CLS.
        encoder: An encoder, or a decoder without a memory.
        head: From the vector of a position to its scores.

    Examples:
        >>> import torch
        >>> from klformer import AttentionSpec
        >>> from klformer.models import InputShape, ModelConfig, PositionClassifier, build_classifier
        >>> shape = InputShape(max_len=50, input_dim=8)
        >>> spec = AttentionSpec(name="gmm-prf")
        >>> model = build_classifier(ModelConfig(), spec, shape, num_outputs=3, of_positions=True)
        >>> isinstance(model, PositionClassifier)
        True
        >>> model(torch.randn(2, 50, 8)).shape
        torch.Size([2, 50, 3])
    """

    def __init__(
        self, embedding: SequenceEmbedding, encoder: TransformerEncoder | TransformerDecoder, head: ClassifierHead
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Scores (B, L, num_outputs).

        Args:
            inputs: Tokens (B, L) or vectors (B, L, input_dim).
            key_mask: (B, L), True = keep.
        """
        x, key_mask = self.embedding(inputs, key_mask)
        return self.head(self.encoder(x, key_mask=key_mask))


class PairClassifier(nn.Module):
    """Scores of a pair of sequences, both through the same encoder.

    Args:
        embedding: From tokens or vectors to inputs of the encoder.
        encoder: Layers of the model's size.
        head: From two vectors to the scores.

    Examples:
        The two sides may have different lengths:

        >>> import torch
        >>> from klformer import AttentionSpec
        >>> from klformer.models import InputShape, ModelConfig, build_classifier
        >>> shape = InputShape(max_len=50, vocab_size=100, is_pair=True)
        >>> model = build_classifier(ModelConfig(), AttentionSpec(name="gmm-prf"), shape, num_outputs=2)
        >>> first, second = torch.randint(100, (4, 50)), torch.randint(100, (4, 30))
        >>> model(first, second).shape
        torch.Size([4, 2])
        >>> model.encode(first).shape
        torch.Size([4, 64])
    """

    def __init__(self, embedding: SequenceEmbedding, encoder: TransformerEncoder, head: PairClassifierHead) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def encode(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The vector of each sequence, (B, model_dim).

        Args:
            inputs: Tokens (B, L) or vectors (B, L, input_dim).
            key_mask: (B, L), True = keep.
        """
        return sequence_vectors(self.embedding, self.encoder, inputs, key_mask)

    def forward(
        self, first: Tensor, second: Tensor, first_mask: Tensor | None = None, second_mask: Tensor | None = None
    ) -> Tensor:
        """Scores (B, num_outputs) of the pairs.

        Args:
            first: Tokens (B, L) or vectors (B, L, input_dim).
            second: The other side of each pair, (B, S) or (B, S, input_dim).
            first_mask: (B, L), True = keep.
            second_mask: (B, S), True = keep.
        """
        return self.head(self.encode(first, first_mask), self.encode(second, second_mask))
