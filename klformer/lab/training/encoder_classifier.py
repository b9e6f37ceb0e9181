"""A pretrained encoder with a head of its own: what a run with `--encoder` trains."""

from typing import Any

import torch
from torch import Tensor, nn

from klformer.models.heads import ClassifierHead
from klformer.noise import has_noise

#: Texts whose vectors a frozen encoder keeps.
MOST_VECTORS = 100_000


class EncoderClassifier(nn.Module):
    """Scores of texts: encoder, norm, dropout, head.

    A frozen encoder reads every text once, alone and without its dropout; what it gave is kept beside the weights. Its
    results do not depend on what else is in a batch.

    Args:
        encoder: From token ids and a mask, (B, L) each, to vectors (B, model_dim).
        model_dim: Size of these vectors.
        hidden_dim: Hidden size of the head.
        num_outputs: Scores of a text.
        dropout: Of the vectors.
        padding: Token id where there is none.
        frozen: Whether the head alone is trained.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        model_dim: int,
        hidden_dim: int,
        num_outputs: int,
        dropout: float,
        padding: int,
        frozen: bool,
    ) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(not frozen)
        self.norm = nn.LayerNorm(model_dim)
        self.dropout = nn.Dropout(dropout)
        self.head = ClassifierHead(model_dim=model_dim, hidden_dim=hidden_dim, num_outputs=num_outputs)
        self._padding, self._frozen = padding, frozen
        self._vectors: dict[bytes, Tensor] = {}
        self.register_load_state_dict_post_hook(lambda *_: self._vectors.clear())  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> "EncoderClassifier":
        super().train(mode)
        if self._frozen:
            self.encoder.eval()
        return self

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Scores (B, num_outputs).

        Args:
            inputs: Token ids (B, L).
            key_mask: (B, L), True = keep.
        """
        key_mask = torch.ones_like(inputs, dtype=torch.bool) if key_mask is None else key_mask
        if self._frozen and not has_noise(self.encoder):
            vectors = torch.stack([self._vector(row[mask]) for row, mask in zip(inputs, key_mask, strict=True)])
        else:
            vectors = self.encoder(inputs.masked_fill(~key_mask, self._padding), key_mask.long())
        return self.head(self.dropout(self.norm(vectors)))

    @torch.no_grad()
    def _vector(self, tokens: Tensor) -> Tensor:
        """The vector of a text, (model_dim,), kept if it is a new one."""
        key = tokens.cpu().numpy().tobytes()
        if (vector := self._vectors.get(key)) is None:
            vector = self.encoder(tokens[None], torch.ones_like(tokens)[None])[0]
            if len(self._vectors) < MOST_VECTORS:
                self._vectors[key] = vector
        return vector

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_vectors": {}}
