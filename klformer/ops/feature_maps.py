"""What is done with the projections u = x Omega^T: the feature maps and their vector-Jacobian products.

    rks   phi(x) = [cos u, sin u]          random kitchen sinks, Eq. 3 of the paper
    prf   phi(x) = exp(u)                  positive random features, Eq. 9 without its exp(-c |x|^2)
    elu   phi(x) = elu(x) + 1              the fixed map of LinearElu; no frequencies

The factor exp(-c |x|^2) of Eq. 9 is an envelope: that of a query cancels in attention's quotient, that of a key is a
log-weight of the key (`envelopes.py`). Constant factors (1 / sqrt R) cancel as well and are left out.

A map works on one chunk of the sequence, (rows, chunk, .), and knows nothing of attention. The scores of exponential
maps may be shifted by the caller, whose business it is to make the shift cancel. A map is registered by its name, and
`name` stands behind a dash in the names of attentions: `gmm-rks`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import elu

from klformer.registry import Registry


class FeatureMap(ABC):
    """Scores of a chunk, then features of the scores, and the same way back for gradients."""

    name: ClassVar[str]
    #: Whether scores are projections on frequencies; otherwise they are the inputs themselves.
    needs_frequencies: ClassVar[bool] = True
    #: The features are exponentials of the scores, so that a shift of the scores is a factor of the features.
    exponential: ClassVar[bool] = False
    #: Whether the kernel's value at distance 0 is known to be 1, so that a constant added to it has a meaning.
    takes_smoothing: ClassVar[bool] = False
    #: Features made of each projection; F = parts R. They stand one part after the other along the rows, not side by
    #: side: each part is contiguous, and a product with all of them is one batched matrix product of more rows.
    parts: ClassVar[int] = 1
    #: Options that every kernel with this map has, with their defaults.
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def repeat(self, x: Tensor) -> Tensor:
        """(rows, ...) -> (parts rows, ...): the same operand for every part."""
        return x if self.parts == 1 else x.expand(self.parts, *x.shape).flatten(0, 1)

    def merge(self, x: Tensor) -> Tensor:
        """(parts rows, ...) -> (rows, ...): the sum over the parts."""
        return x if self.parts == 1 else x.view(self.parts, x.shape[0] // self.parts, *x.shape[1:]).sum(0)

    def scores(self, x: Tensor, omega: Tensor | None) -> Tensor:
        """Projections x Omega^T of a chunk, or a copy of x for a map without frequencies."""
        return x.clone() if omega is None else torch.bmm(x, omega.transpose(1, 2))

    def scores_vjp(self, d_scores: Tensor, omega: Tensor | None) -> Tensor:
        """Gradient of x, given that of its scores."""
        return d_scores if omega is None else torch.bmm(d_scores, omega)

    @abstractmethod
    def features(self, scores: Tensor) -> Tensor:
        """Features (parts rows, chunk, R) of scores (rows, chunk, R). May overwrite the scores."""

    @abstractmethod
    def vjp(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        """Gradient of the scores (rows, chunk, R). May overwrite `d_phi`.

        Features that were multiplied by a constant may be given, with the gradient of the product.
        """

    @abstractmethod
    def explicit(self, scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
        """Features (..., parts R) of scores (..., R), side by side, times exp(log_weight (..., R)); plain and
        differentiable, for analysis."""


class RandomKitchenSinks(FeatureMap):
    """phi(x) = [cos u, sin u]; phi(q).phi(k) = sum_r cos(omega_r.(q - k))."""

    name = "rks"
    parts = 2
    takes_smoothing = True
    # The authors' code and the paper's presets have 1: a contrast of 2 : 1 at most (docs/decisions.md).
    options = MappingProxyType({"smoothing": 0.1, "learn_smoothing": False})

    def features(self, scores: Tensor) -> Tensor:
        phi = scores.new_empty(2, *scores.shape)
        torch.cos(scores, out=phi[0])
        torch.sin(scores, out=phi[1])
        return phi.flatten(0, 1)

    def vjp(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        cos, sin = phi.chunk(2)
        d_cos, d_sin = d_phi.chunk(2)
        return d_sin.mul_(cos).addcmul_(sin, d_cos, value=-1)

    def explicit(self, scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
        weight = 1.0 if log_weight is None else log_weight.exp()
        return torch.cat([scores.cos() * weight, scores.sin() * weight], dim=-1)


class PositiveRandomFeatures(FeatureMap):
    """phi(x) = exp(u); phi(q).phi(k) = sum_r exp(omega_r.(q + k))."""

    name = "prf"
    exponential = True
    options = MappingProxyType({"envelope": "gaussian", "norm_coefficient": 1.0})

    def features(self, scores: Tensor) -> Tensor:
        return scores.exp_()

    def vjp(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        return d_phi.mul_(phi)

    def explicit(self, scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
        return (scores if log_weight is None else scores + log_weight).exp()


class EluPlusOne(FeatureMap):
    """phi(x) = elu(x) + 1 = max(x + 1, e^x), the LinearElu map."""

    name = "elu"
    needs_frequencies = False

    def features(self, scores: Tensor) -> Tensor:
        # elu(x) + 1 written so that e^x keeps its digits where it is small.
        return scores.clamp(max=0).exp_().add_(scores.clamp_(min=0))

    def vjp(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        return d_phi.mul_(phi.clamp(max=1))

    def explicit(self, scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
        features = elu(scores) + 1
        return features if log_weight is None else features * log_weight.exp()


FEATURE_MAPS: Registry[FeatureMap] = Registry("feature map")
for _map in (RandomKitchenSinks(), PositiveRandomFeatures(), EluPlusOne()):
    FEATURE_MAPS.add(_map.name, _map)
