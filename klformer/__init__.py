"""klformer: Transformers whose attention kernel is learned from data, linear in the sequence length."""

from klformer.attention import (
    AttentionMechanism,
    MultiheadAttention,
    attention_names,
    attention_options,
    build_attention,
)
from klformer.models import TransformerDecoder, TransformerEncoder
from klformer.noise import resample
from klformer.ops.spectral_product import spectral_product

__version__ = "0.1.0"

__all__ = [
    "AttentionMechanism",
    "MultiheadAttention",
    "TransformerDecoder",
    "TransformerEncoder",
    "attention_names",
    "attention_options",
    "build_attention",
    "resample",
    "spectral_product",
]
