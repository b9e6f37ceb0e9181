"""From a sequence to one vector: the output at CLS, or the mean of the outputs at its tokens."""

import torch
from torch import Tensor

from klformer.models.embeddings import SequenceEmbedding
from klformer.models.transformer import TransformerEncoder
from klformer.ops.spectral_product.parts import Parts


def masked_mean(x: Tensor, key_mask: Tensor | None = None, parts: Parts | None = None) -> Tensor:
    """The mean (B, model_dim) of x (B, L, model_dim) over what key_mask (B, L) keeps; 0 if that is nothing.

    Args:
        parts: Those who have the other parts of the sequences, if they are in parts; all get the mean of the whole.
    """
    if parts is not None:
        kept = x if key_mask is None else x.masked_fill(~key_mask.unsqueeze(-1), 0)
        counts = x.new_full((x.shape[0], 1), x.shape[1]) if key_mask is None else key_mask.sum(1, keepdim=True).to(x)
        sums = parts.sum(torch.cat([kept.sum(1), counts], dim=-1))
        return sums[:, :-1] / sums[:, -1:].detach().clamp(min=1)
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
    if embedding.cls_token is None:
        return masked_mean(encoder(x, key_mask=key_mask), key_mask, embedding.parts)
    first = encoder(x, key_mask=key_mask, num_outputs=1)
    # In parts: one has the position, the others have none of it, and all get it.
    return first[:, 0] if embedding.parts is None else embedding.parts.sum(first.sum(1))
