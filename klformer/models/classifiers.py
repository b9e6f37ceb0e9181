"""Whole models: embedding, encoder and head put together."""

from torch import Tensor, nn

from klformer.models.embeddings import SequenceEmbedding
from klformer.models.heads import ClassifierHead, PairClassifierHead
from klformer.models.transformer import TransformerEncoder


class SequenceClassifier(nn.Module):
    """Class scores of a sequence, read off its CLS position."""

    def __init__(self, embedding: SequenceEmbedding, encoder: TransformerEncoder, head: ClassifierHead) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, L) or vectors (B, L, input_dim), key_mask (B, L) True = keep -> scores (B, num_classes)."""
        x, key_mask = self.embedding(inputs, key_mask)
        return self.head(self.encoder(x, key_mask=key_mask, num_outputs=1)[:, 0])


class PairClassifier(nn.Module):
    """Class scores of a pair of sequences, both through the same encoder."""

    def __init__(self, embedding: SequenceEmbedding, encoder: TransformerEncoder, head: PairClassifierHead) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def encode(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The CLS vector of each sequence, (B, model_dim)."""
        x, key_mask = self.embedding(inputs, key_mask)
        return self.encoder(x, key_mask=key_mask, num_outputs=1)[:, 0]

    def forward(
        self, first: Tensor, second: Tensor, first_mask: Tensor | None = None, second_mask: Tensor | None = None
    ) -> Tensor:
        """Two batches of tokens (B, L) with masks, True = keep -> scores (B, num_classes)."""
        return self.head(self.encode(first, first_mask), self.encode(second, second_mask))
