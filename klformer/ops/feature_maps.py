"""What is done with the projections u = x Omega^T: the feature maps and their vector-Jacobian products.

    rks   phi(x) = [cos u, sin u]          random kitchen sinks, Eq. 3 of the paper
    prf   phi(x) = exp(u - c |x|^2)        positive random features, Eq. 9; c = 1, or 1/2 for the softmax kernel
    elu   phi(x) = elu(x) + 1              the fixed map of LinearElu; no frequencies

A map works on one chunk of the sequence, (rows, chunk, .), and knows nothing of attention. Constant factors (1 / sqrt
R) are left out, because attention is a quotient in which they cancel. The scores of exponential maps may be shifted by
the caller, whose business it is to make the shift cancel.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from klformer.errors import ArgumentError

FeatureMapName = Literal["rks", "prf", "elu"]
FEATURE_MAP_NAMES: tuple[FeatureMapName, ...] = ("rks", "prf", "elu")


class FeatureMap(ABC):
    """Scores of a chunk, then features of the scores, and the same way back for gradients."""

    #: The features are exponentials of the scores, so that a shift of the scores is a factor of the features.
    exponential = False
    #: Features made of each projection; F = copies R. They stand one copy after the other along the rows, not side by
    #: side: each copy is contiguous, and a product with all of them is one batched matrix product of twice the rows.
    copies = 1

    def repeat(self, x: Tensor) -> Tensor:
        """(rows, ...) -> (copies rows, ...): the same operand for every copy."""
        return x if self.copies == 1 else x.expand(self.copies, *x.shape).flatten(0, 1)

    def merge(self, x: Tensor) -> Tensor:
        """(copies rows, ...) -> (rows, ...): the sum over the copies."""
        return x if self.copies == 1 else x.view(self.copies, x.shape[0] // self.copies, *x.shape[1:]).sum(0)

    @abstractmethod
    def features(self, scores: Tensor) -> Tensor:
        """Features (copies rows, chunk, R) of scores (rows, chunk, R). May overwrite the scores."""

    @abstractmethod
    def vjp(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        """Gradient of the scores (rows, chunk, R). May overwrite `d_phi`."""

    def scores(self, x: Tensor, omega: Tensor | None) -> Tensor:
        """Projections of queries: x Omega^T, or x itself for a map without frequencies."""
        return x.clone() if omega is None else torch.bmm(x, omega.transpose(1, 2))

    def key_scores(self, x: Tensor, omega: Tensor | None) -> Tensor:
        """Projections of keys, with every term that does not cancel in the quotient."""
        return self.scores(x, omega)

    def inputs_vjp(self, d_scores: Tensor, omega: Tensor | None) -> Tensor:
        """Gradient of queries, given that of their scores."""
        return d_scores if omega is None else torch.bmm(d_scores, omega)

    def key_inputs_vjp(self, x: Tensor, d_scores: Tensor, omega: Tensor | None) -> Tensor:
        """Gradient of keys, given that of their scores."""
        return self.inputs_vjp(d_scores, omega)


class RandomKitchenSinks(FeatureMap):
    """phi(x) = [cos u, sin u]; phi(q).phi(k) = sum_r cos(omega_r.(q - k))."""

    copies = 2

    def features(self, scores: Tensor) -> Tensor:
        phi = scores.new_empty(2, *scores.shape)
        torch.cos(scores, out=phi[0])
        torch.sin(scores, out=phi[1])
        return phi.flatten(0, 1)

    def vjp(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        cos, sin = phi.chunk(2)
        d_cos, d_sin = d_phi.chunk(2)
        return d_sin.mul_(cos).addcmul_(sin, d_cos, value=-1)


class PositiveRandomFeatures(FeatureMap):
    """phi(x) = exp(u - c |x|^2); phi(q).phi(k) = sum_r exp(omega_r.(q + k) - c |q|^2 - c |k|^2).

    The query's own norm multiplies its numerator and its denominator alike and is never computed.
    """

    exponential = True

    def __init__(self, norm_coefficient: float) -> None:
        self.norm_coefficient = norm_coefficient

    def features(self, scores: Tensor) -> Tensor:
        return scores.exp_()

    def vjp(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        return d_phi.mul_(phi)

    def key_scores(self, x: Tensor, omega: Tensor | None) -> Tensor:
        return self.scores(x, omega).sub_(self.norm_coefficient * x.square().sum(-1, keepdim=True))

    def key_inputs_vjp(self, x: Tensor, d_scores: Tensor, omega: Tensor | None) -> Tensor:
        d_norm = d_scores.sum(-1, keepdim=True).mul_(-2 * self.norm_coefficient)
        return self.inputs_vjp(d_scores, omega).addcmul_(x, d_norm)


class EluPlusOne(FeatureMap):
    """phi(x) = elu(x) + 1 = max(x + 1, e^x), the LinearElu map."""

    def features(self, scores: Tensor) -> Tensor:
        # elu(x) + 1 written so that e^x keeps its digits where it is small.
        return scores.clamp(max=0).exp_().add_(scores.clamp_(min=0))

    def vjp(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        return d_phi.mul_(phi.clamp(max=1))


def make_feature_map(name: str, norm_coefficient: float = 1.0) -> FeatureMap:
    """The map called `name`.

    Raises:
        ValueError: for a name that is not in FEATURE_MAP_NAMES.
    """
    if name == "rks":
        return RandomKitchenSinks()
    if name == "prf":
        return PositiveRandomFeatures(norm_coefficient)
    if name == "elu":
        return EluPlusOne()
    raise ArgumentError(f"feature_map must be one of {', '.join(FEATURE_MAP_NAMES)}, got {name!r}")
