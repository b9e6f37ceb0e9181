"""klformer: Transformers whose attention kernel is learned from data, linear in the sequence length.

The names below are imported when they are first used: `import klformer` and `klformer --version` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from klformer.attention import (
        AttentionMechanism,
        AttentionSizes,
        AttentionSpec,
        MultiheadAttention,
        attention_capabilities,
        attention_names,
        attention_options,
        build_attention,
        register_attention,
        register_spectrum,
    )
    from klformer.conversion import Conversion, convert, load_converted
    from klformer.kernels import SpectralDistribution
    from klformer.models import EncoderConfig, TransformerDecoder, TransformerEncoder
    from klformer.noise import resample, without_noise
    from klformer.ops.spectral_product import spectral_product
    from klformer.tasks import Task, register_task
    from klformer.training.objective import Objective

__version__ = "0.2.0"

__all__ = [
    "AttentionMechanism",
    "AttentionSizes",
    "AttentionSpec",
    "Conversion",
    "EncoderConfig",
    "MultiheadAttention",
    "Objective",
    "SpectralDistribution",
    "Task",
    "TransformerDecoder",
    "TransformerEncoder",
    "attention_capabilities",
    "attention_names",
    "attention_options",
    "build_attention",
    "convert",
    "load_converted",
    "register_attention",
    "register_spectrum",
    "register_task",
    "resample",
    "spectral_product",
    "without_noise",
]

#: The module that each name comes from.
_HOMES = {
    "AttentionMechanism": "klformer.attention",
    "AttentionSizes": "klformer.attention",
    "AttentionSpec": "klformer.attention",
    "Conversion": "klformer.conversion",
    "EncoderConfig": "klformer.models",
    "MultiheadAttention": "klformer.attention",
    "Objective": "klformer.training.objective",
    "SpectralDistribution": "klformer.kernels",
    "Task": "klformer.tasks",
    "TransformerDecoder": "klformer.models",
    "TransformerEncoder": "klformer.models",
    "attention_capabilities": "klformer.attention",
    "attention_names": "klformer.attention",
    "attention_options": "klformer.attention",
    "build_attention": "klformer.attention",
    "convert": "klformer.conversion",
    "load_converted": "klformer.conversion",
    "register_attention": "klformer.attention",
    "register_spectrum": "klformer.attention",
    "register_task": "klformer.tasks",
    "resample": "klformer.noise",
    "spectral_product": "klformer.ops.spectral_product",
    "without_noise": "klformer.noise",
}


if not TYPE_CHECKING:  # a type checker would take it for a promise of any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'klformer' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        # The next time, it is found without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
