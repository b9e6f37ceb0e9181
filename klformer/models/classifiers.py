"""Whole models: embedding, encoder and head put together."""

from torch import Tensor, nn

from klformer.models.embeddings import SequenceEmbedding
from klformer.models.heads import ClassifierHead
from klformer.models.pooling import sequence_vectors
from klformer.models.transformer import TransformerDecoder, TransformerEncoder


class Model(nn.Module):
    """An embedding, an encoder and a head.

    Args:
        embedding: From tokens or vectors to inputs of the encoder.
        encoder: Layers of the model's size.
        head: From vectors to scores.
    """

    def __init__(
        self, embedding: SequenceEmbedding, encoder: TransformerEncoder | TransformerDecoder, head: nn.Module
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def encode(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return one vector (B, model_dim) for each sequence: at CLS if the embedding puts one in front, else the mean.

        Args:
            inputs: Tokens (B, L) or vectors (B, L, input_dim).
            key_mask: (B, L), True = keep.
        """
        assert isinstance(self.encoder, TransformerEncoder)
        return sequence_vectors(self.embedding, self.encoder, inputs, key_mask)


class SequenceClassifier(Model):
    """Scores of a sequence, read off its CLS position, or off the mean over its tokens if there is no CLS.

    `build_classifier` puts one together from a configuration.

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
        >>> model(tokens, key_mask).shape, model.encode(tokens, key_mask).shape
        (torch.Size([2, 3]), torch.Size([2, 16]))
    """

    head: ClassifierHead

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Scores (B, num_outputs).

        Args:
            inputs: Tokens (B, L) or vectors (B, L, input_dim).
            key_mask: (B, L), True = keep.
        """
        return self.head(self.encode(inputs, key_mask))


class PositionClassifier(Model):
    """Scores of every position of a sequence, by an encoder, or by a decoder that sees the past only.

    Examples:
        >>> import torch
        >>> from klformer import AttentionSpec
        >>> from klformer.models import InputShape, ModelConfig, PositionClassifier, build_classifier
        >>> shape = InputShape(max_len=50, input_dim=8)
        >>> spec = AttentionSpec(name="gmm-prf")
        >>> model = build_classifier(ModelConfig(), spec, shape, num_outputs=3, of_positions=True)
        >>> isinstance(model, PositionClassifier)
        True
        >>> vectors = torch.randn(2, 50, 8)
        >>> model(vectors).shape, model.encode(vectors).shape
        (torch.Size([2, 50, 3]), torch.Size([2, 64]))
    """

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Scores (B, L, num_outputs).

        Args:
            inputs: Tokens (B, L) or vectors (B, L, input_dim).
            key_mask: (B, L), True = keep.
        """
        x, key_mask = self.embedding(inputs, key_mask)
        return self.head(self.encoder(x, key_mask=key_mask))


class PairClassifier(Model):
    """Scores of a pair of sequences, both through the same encoder.

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
