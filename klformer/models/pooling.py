"""From a sequence to one vector: the output at CLS, or the mean of the outputs at its tokens."""

from torch import Tensor

from klformer.models.embeddings import SequenceEmbedding
from klformer.models.transformer import TransformerEncoder


def masked_mean(x: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """The mean (B, model_dim) of x (B, L, model_dim) over what key_mask (B, L) keeps; 0 if that is nothing."""
    if key_mask is None:
        return x.sum(1) / max(x.shape[1], 1)
    kept = x.masked_fill(~key_mask.unsqueeze(-1), 0)
    return kept.sum(1) / key_mask.sum(1, keepdim=True).clamp(min=1)


def sequence_vectors(
    embedding: SequenceEmbedding, encoder: TransformerEncoder, inputs: Tensor, key_mask: Tensor | None = None
) -> Tensor:
    """One vector (B, model_dim) for each sequence: at CLS if the embedding puts one in front, else the mean.

    Args:
        inputs: Tokens (B, L) or vectors (B, L, input_dim).
        key_mask: (B, L), True = keep.
    """
    x, key_mask = embedding(inputs, key_mask)
    if embedding.cls_token is not None:
        return encoder(x, key_mask=key_mask, num_outputs=1)[:, 0]
    return masked_mean(encoder(x, key_mask=key_mask), key_mask)
