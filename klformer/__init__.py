"""klformer: Transformers whose attention kernel is learned from data, linear in the sequence length.

The library needs torch, safetensors and pydantic. `klformer.lab`, with tasks, training, reports and the command line,
needs the extra `lab`.

The names below, and its modules, are imported when they are first used: `import klformer` and `klformer --version` need
no torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from klformer import autoload

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
    from klformer.conversion import Conversion, ConversionConfig, convert, load_converted
    from klformer.kernels import SpectralDistribution
    from klformer.lab.tasks import Task, register_task
    from klformer.lab.training.objective import Objective
    from klformer.models import EncoderConfig, TransformerDecoder, TransformerEncoder
    from klformer.noise import resample, without_noise
    from klformer.ops.near import merge_results, near_attention
    from klformer.ops.spectral_product import (
        Backend,
        KernelState,
        absorb,
        causal,
        read,
        record_backends,
        register_backend,
        spectral_product,
        use_backend,
    )

__version__ = "0.3.0"

__all__ = [
    "AttentionMechanism",
    "AttentionSizes",
    "AttentionSpec",
    "Backend",
    "Conversion",
    "ConversionConfig",
    "EncoderConfig",
    "KernelState",
    "MultiheadAttention",
    "Objective",
    "SpectralDistribution",
    "Task",
    "TransformerDecoder",
    "TransformerEncoder",
    "absorb",
    "attention_capabilities",
    "attention_names",
    "attention_options",
    "build_attention",
    "causal",
    "convert",
    "load_converted",
    "merge_results",
    "near_attention",
    "read",
    "record_backends",
    "register_attention",
    "register_backend",
    "register_spectrum",
    "register_task",
    "resample",
    "spectral_product",
    "use_backend",
    "without_noise",
]

#: The names that each module has.
_NAMES = {
    "attention": "AttentionMechanism AttentionSizes AttentionSpec MultiheadAttention attention_capabilities "
    "attention_names attention_options build_attention register_attention register_spectrum",
    "conversion": "Conversion ConversionConfig convert load_converted",
    "kernels": "SpectralDistribution",
    "lab.tasks": "Task register_task",
    "lab.training.objective": "Objective",
    "models": "EncoderConfig TransformerDecoder TransformerEncoder",
    "noise": "resample without_noise",
    "ops.near": "merge_results near_attention",
    "ops.spectral_product": "Backend KernelState absorb causal read record_backends register_backend "
    "spectral_product use_backend",
}
_HOMES = {name: f"klformer.{module}" for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker would take it for a promise of any name

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        elif not name.startswith("_") and find_spec(f"klformer.{name}") is not None:
            value = import_module(f"klformer.{name}")
        else:
            raise AttributeError(f"module 'klformer' has no attribute {name!r}")
        # The next time, it is found without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


autoload.register()
