"""What is done with the projections u = x Omega^T: the feature maps and their vector-Jacobian products.

    rks   phi(x) = [cos u, sin u]          random kitchen sinks, Eq. 3 of the paper
    prf   phi(x) = exp(u)                  positive random features, Eq. 9 without its exp(-c |x|^2)
    elu   phi(x) = elu(x) + 1              the fixed map of LinearElu; no frequencies

The factor exp(-c |x|^2) of Eq. 9 is an envelope: that of a query cancels in attention's quotient, that of a key is a
log-weight of the key (`envelopes.py`). Constant factors (1 / sqrt R) cancel as well and are left out.

A map works on one chunk of the sequence and knows nothing of attention. The scores of exponential
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
    #: No feature is negative, so that every kernel with this map has a logarithm.
    positive: ClassVar[bool] = True
    #: Whether the kernel's value at distance 0 is known to be 1, so that a constant added to it has a meaning.
    takes_smoothing: ClassVar[bool] = False
    #: Features made of each projection; F = parts R. They stand one part after the other.
    parts: ClassVar[int] = 1
    #: Options that every kernel with this map has, with their defaults.
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @abstractmethod
    def features(self, scores: Tensor, out: Tensor, dim: int) -> Tensor:
        """Features of scores, written to `out`, which is returned. May overwrite the scores.

        Args:
            scores: R of them along axis `dim`.
            out: F of them along that axis.
        """

    @abstractmethod
    def vjp(self, phi: Tensor, d_phi: Tensor, dim: int) -> Tensor:
        """Gradient of the scores, R along axis `dim`; a part of `d_phi`, which is overwritten.

        Features that were multiplied by a constant may be given, with the gradient of the product.
        """

    @abstractmethod
    def explicit(self, scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
        """Features (..., parts R) of scores (..., R), side by side, times exp(log_weight (..., R)); plain and
        differentiable, for analysis."""


class RandomKitchenSinks(FeatureMap):
    """phi(x) = [cos u, sin u]; phi(q).phi(k) = sum_r cos(omega_r.(q - k))."""

    name = "rks"
    positive = False
    parts = 2
    takes_smoothing = True
    # The authors' code and the paper's presets have 1: a contrast of 2 : 1 at most.
    options = MappingProxyType({"smoothing": 0.1, "learn_smoothing": False})

    def features(self, scores: Tensor, out: Tensor, dim: int) -> Tensor:
        cos, sin = out.chunk(2, dim)
        if dim == -1 and out.device.type == "cpu" and torch.get_num_threads() > 1:
            # With several threads torch takes five times as long to write sines side by side as one after the other.
            cos.copy_(scores.cos())
            sin.copy_(scores.sin_())
            return out
        torch.cos(scores, out=cos)
        torch.sin(scores, out=sin)
        return out

    def vjp(self, phi: Tensor, d_phi: Tensor, dim: int) -> Tensor:
        cos, sin = phi.chunk(2, dim)
        d_cos, d_sin = d_phi.chunk(2, dim)
        return d_sin.mul_(cos).addcmul_(sin, d_cos, value=-1)

    def explicit(self, scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
        weight = 1.0 if log_weight is None else log_weight.exp()
        return torch.cat([scores.cos() * weight, scores.sin() * weight], dim=-1)


class PositiveRandomFeatures(FeatureMap):
    """phi(x) = exp(u); phi(q).phi(k) = sum_r exp(omega_r.(q + k))."""

    name = "prf"
    exponential = True
    options = MappingProxyType({"envelope": "gaussian", "norm_coefficient": 1.0})

    def features(self, scores: Tensor, out: Tensor, dim: int) -> Tensor:
        return torch.exp(scores, out=out)

    def vjp(self, phi: Tensor, d_phi: Tensor, dim: int) -> Tensor:
        return d_phi.mul_(phi)

    def explicit(self, scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
        return (scores if log_weight is None else scores + log_weight).exp()


class EluPlusOne(FeatureMap):
    """phi(x) = elu(x) + 1 = max(x + 1, e^x), the LinearElu map."""

    name = "elu"
    needs_frequencies = False

    def features(self, scores: Tensor, out: Tensor, dim: int) -> Tensor:
        # elu(x) + 1 written so that e^x keeps its digits where it is small.
        return torch.clamp(scores, max=0, out=out).exp_().add_(scores.clamp_(min=0))

    def vjp(self, phi: Tensor, d_phi: Tensor, dim: int) -> Tensor:
        return d_phi.mul_(phi.clamp(max=1))

    def explicit(self, scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
        features = elu(scores) + 1
        return features if log_weight is None else features * log_weight.exp()


FEATURE_MAPS: Registry[FeatureMap] = Registry("feature map")
for _map in (RandomKitchenSinks(), PositiveRandomFeatures(), EluPlusOne()):
    FEATURE_MAPS.add(_map.name, _map)
