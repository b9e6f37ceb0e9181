"""Attentions by name, and the multi-head layer around any of them."""

from klformer.attention import kernelized, softmax  # noqa: F401  (they register their attentions)
from klformer.attention.base import AttentionMechanism, attention_names, attention_options, build_attention
from klformer.attention.multihead import MultiheadAttention

__all__ = [
    "AttentionMechanism",
    "MultiheadAttention",
    "attention_names",
    "attention_options",
    "build_attention",
]
