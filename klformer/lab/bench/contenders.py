"""Whom `klformer bench peers` compares, and with whom; `peer_modules` builds them.

attention   torch scaled_dot_product_attention, performer-pytorch's FastAttention, the same features materialised
encoder     torch.nn.TransformerEncoder, performer-pytorch's Performer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from klformer.attention import build_attention
from klformer.attention.kernelized import KernelizedAttention

Level = Literal["attention", "encoder"]
Maker = Literal["klformer", "torch", "performer-pytorch", "materialised"]


@dataclass(frozen=True)
class PeerSizes:
    """Shape of the problem; everyone has the same."""

    length: int = 1024
    """Tokens L of the sequence."""
    batch: int = 1
    """Sequences B."""
    heads: int = 8
    """Heads H."""
    head_dim: int = 64
    """Size D = E of queries, keys and values; an encoder has a model of H D and 4 H D hidden units."""
    num_frequencies: int = 128
    """Frequencies R of the kernels, the features of Performer."""
    num_layers: int = 2
    """Layers of the encoders."""


@dataclass(frozen=True)
class Contender:
    """Who computes what: an attention of klformer, or another's way to it."""

    level: Level
    """One attention or an encoder."""
    maker: Maker
    """Whose code."""
    attention: str
    """klformer's attention whose weights are taken over."""

    def label(self) -> str:
        names = {
            ("attention", "torch"): "torch scaled_dot_product_attention",
            ("encoder", "torch"): "torch.nn.TransformerEncoder",
            ("attention", "performer-pytorch"): "performer-pytorch FastAttention",
            ("encoder", "performer-pytorch"): "performer-pytorch Performer",
            ("attention", "materialised"): f"{self.attention}, features materialised",
            ("attention", "klformer"): self.attention,
            ("encoder", "klformer"): f"encoder, {self.attention}",
        }
        return names[self.level, self.maker]


@dataclass(frozen=True)
class Pair:
    """A peer and the part of klformer that it is compared with."""

    peer: Contender
    ours: Contender
    #: The results are to be the same.
    same: bool


def pairs(attentions: Mapping[Level, Sequence[str]]) -> list[Pair]:
    """Who is compared with whom: every attention with torch, kernels with their features, Performer with its peer."""
    found = []
    for level, names in attentions.items():
        for name in names:
            ours = Contender(level, "klformer", name)
            # One torch for all: its weights are those of klformer's softmax.
            found.append(Pair(Contender(level, "torch", "softmax"), ours, same=name == "softmax"))
            if name == "performer":
                found.append(Pair(Contender(level, "performer-pytorch", name), ours, same=True))
            if level == "attention" and _is_kernel(name):
                found.append(Pair(Contender(level, "materialised", name), ours, same=True))
    return found


def _is_kernel(name: str) -> bool:
    return isinstance(build_attention(name, num_heads=1, head_dim=2, max_len=4), KernelizedAttention)
