"""Attentions by name, and the multi-head layer around any of them."""

# Importing a module registers its attentions, in the order in which they are listed.
# isort: off
from klformer.attention import kernelized, hedgehog, softmax  # noqa: F401
from klformer.attention import local, longformer, bigbird, sparse, linformer, reformer, sinkhorn, synthesizer  # noqa: F401

# isort: on
from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.kernelized import register_spectrum
from klformer.attention.multihead import MultiheadAttention
from klformer.attention.registry import (
    attention_capabilities,
    attention_names,
    attention_options,
    build_attention,
    register_attention,
)
from klformer.attention.spec import AttentionSpec

__all__ = [
    "AttentionMechanism",
    "AttentionSizes",
    "AttentionSpec",
    "MultiheadAttention",
    "attention_capabilities",
    "attention_names",
    "attention_options",
    "build_attention",
    "register_attention",
    "register_spectrum",
]
