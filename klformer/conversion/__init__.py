"""A trained softmax model becomes linear: its attention is replaced by kernels that are learned from it."""

from klformer.conversion.api import Conversion, convert
from klformer.conversion.hosts import ConversionError
from klformer.conversion.saving import load_converted

__all__ = ["Conversion", "ConversionError", "convert", "load_converted"]
