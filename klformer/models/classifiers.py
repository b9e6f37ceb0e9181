"""Whole models: embedding, encoder and head put together."""

from torch import Tensor, nn

from klformer.models.embeddings import SequenceEmbedding
from klformer.models.heads import ClassifierHead, PairClassifierHead
from klformer.models.pooling import sequence_vectors
from klformer.models.transformer import TransformerDecoder, TransformerEncoder


class SequenceClassifier(nn.Module):
    """Scores of a sequence, read off its CLS position, or off the mean over its tokens if there is no CLS."""

    def __init__(self, embedding: SequenceEmbedding, encoder: TransformerEncoder, head: ClassifierHead) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, L) or vectors (B, L, input_dim), key_mask (B, L) True = keep -> scores (B, num_outputs)."""
        return self.head(sequence_vectors(self.embedding, self.encoder, inputs, key_mask))


class PositionClassifier(nn.Module):
    """Scores of every position of a sequence, by an encoder, or by a decoder that sees the past only."""

    def __init__(
        self, embedding: SequenceEmbedding, encoder: TransformerEncoder | TransformerDecoder, head: ClassifierHead
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, L) or vectors (B, L, input_dim), key_mask (B, L) True = keep -> scores (B, L, num_outputs)."""
        x, key_mask = self.embedding(inputs, key_mask)
        return self.head(self.encoder(x, key_mask=key_mask))


class PairClassifier(nn.Module):
    """Scores of a pair of sequences, both through the same encoder."""

    def __init__(self, embedding: SequenceEmbedding, encoder: TransformerEncoder, head: PairClassifierHead) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def encode(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The vector of each sequence, (B, model_dim)."""
        return sequence_vectors(self.embedding, self.encoder, inputs, key_mask)

    def forward(
        self, first: Tensor, second: Tensor, first_mask: Tensor | None = None, second_mask: Tensor | None = None
    ) -> Tensor:
        """Two batches of tokens (B, L) with masks, True = keep -> scores (B, num_outputs)."""
        return self.head(self.encode(first, first_mask), self.encode(second, second_mask))
