"""klformer: Transformers whose attention kernel is learned from data, linear in the sequence length.

The names below are imported when they are first used: `import klformer` and `klformer --version` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from klformer.attention import (
        AttentionMechanism,
        MultiheadAttention,
        attention_names,
        attention_options,
        build_attention,
    )
    from klformer.models import TransformerDecoder, TransformerEncoder
    from klformer.noise import resample

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
]

#: The module that each name comes from.
_HOMES = {
    "AttentionMechanism": "klformer.attention",
    "MultiheadAttention": "klformer.attention",
    "TransformerDecoder": "klformer.models",
    "TransformerEncoder": "klformer.models",
    "attention_names": "klformer.attention",
    "attention_options": "klformer.attention",
    "build_attention": "klformer.attention",
    "resample": "klformer.noise",
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
