"""A trained softmax model becomes linear: its attention is replaced by kernels that are learned from it."""

from klformer.conversion.api import Conversion, certify, convert
from klformer.conversion.config import ConversionConfig
from klformer.conversion.hosts import ConversionError
from klformer.conversion.learning import fit
from klformer.conversion.planning import plan
from klformer.conversion.saving import load_converted

__all__ = ["Conversion", "ConversionConfig", "ConversionError", "certify", "convert", "fit", "load_converted", "plan"]
