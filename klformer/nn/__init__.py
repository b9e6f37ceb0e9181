"""Modules with torch's own signatures, to be put in the place of torch's."""

from klformer.nn.multihead import MultiheadAttention

__all__ = ["MultiheadAttention"]
