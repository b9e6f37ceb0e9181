"""Which predictions labels ask about, and what is right there."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from klformer.conversion.hosts import Answer, Batch, Host


@dataclass(frozen=True)
class Asked:
    """Predictions that are right or wrong."""

    scores: Tensor  # (N, C)
    right: Tensor  # (N,)

    def loss(self) -> Tensor:
        """Cross-entropy, the mean; 0 if nothing is asked."""
        return cross_entropy(self.scores.float(), self.right, reduction="sum") / max(1, len(self.right))

    def num_right(self) -> Tensor:
        """How many predictions are right."""
        return (self.scores.argmax(-1) == self.right).sum()


def is_language_model(answer: Answer, *, causal: bool) -> bool:
    """Whether each prediction is of the next token."""
    return causal and answer.are_scores and answer.values.dim() == 3


def asked_about(host: Host, batch: Batch, answer: Answer, *, causal: bool) -> Asked | None:
    """What the labels of a batch ask about: classes, masked tokens, or the next tokens of a causal model, which need no
    labels. None if there are no labels, or labels of another kind."""
    if not answer.are_scores:
        return None
    scores, labels, mask = answer.values, host.labels(batch), host.mask(batch)
    if is_language_model(answer, causal=causal):
        following = batch["input_ids"] if labels is None else labels
        if mask is not None:
            following = following.masked_fill(~mask, -100)
        known = following[:, 1:] >= 0
        return Asked(scores[:, :-1][known], following[:, 1:][known])
    if labels is None or labels.is_floating_point() or labels.shape != scores.shape[:-1]:
        return None
    known = labels >= 0
    return Asked(scores[known], labels[known])


def asked_mask(host: Host, batch: Batch, answer: Answer, *, causal: bool) -> Tensor:
    """The predictions, (B,) or (B, L), that count where two models are compared: those that labels ask about, or all
    tokens."""
    scores, labels, mask = answer.values, host.labels(batch), host.mask(batch)
    is_asked = labels is not None and labels.shape == scores.shape[:-1] and not labels.is_floating_point()
    if is_asked and not is_language_model(answer, causal=causal):
        assert labels is not None
        return labels >= 0
    everything = torch.ones(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    return mask if mask is not None and mask.shape == everything.shape else everything
