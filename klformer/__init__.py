"""klformer: Transformers whose attention kernel is learned from data, linear in the sequence length.

The library needs torch, safetensors and pydantic. `klformer.lab`, with tasks, training, reports and the command line,
needs the extra `lab`.

The names below are imported when they are first used: `import klformer` and `klformer --version` need no torch.
"""

from importlib import import_module
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
    from klformer.conversion import Conversion, convert, load_converted
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

__version__ = "0.2.0"

__all__ = [
    "AttentionMechanism",
    "AttentionSizes",
    "AttentionSpec",
    "Backend",
    "Conversion",
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

#: The module that each name comes from.
_HOMES = {
    "AttentionMechanism": "klformer.attention",
    "AttentionSizes": "klformer.attention",
    "AttentionSpec": "klformer.attention",
    "Backend": "klformer.ops.spectral_product",
    "Conversion": "klformer.conversion",
    "EncoderConfig": "klformer.models",
    "KernelState": "klformer.ops.spectral_product",
    "MultiheadAttention": "klformer.attention",
    "Objective": "klformer.lab.training.objective",
    "SpectralDistribution": "klformer.kernels",
    "Task": "klformer.lab.tasks",
    "TransformerDecoder": "klformer.models",
    "TransformerEncoder": "klformer.models",
    "absorb": "klformer.ops.spectral_product",
    "attention_capabilities": "klformer.attention",
    "attention_names": "klformer.attention",
    "attention_options": "klformer.attention",
    "build_attention": "klformer.attention",
    "causal": "klformer.ops.spectral_product",
    "convert": "klformer.conversion",
    "load_converted": "klformer.conversion",
    "merge_results": "klformer.ops.near",
    "near_attention": "klformer.ops.near",
    "read": "klformer.ops.spectral_product",
    "record_backends": "klformer.ops.spectral_product",
    "register_attention": "klformer.attention",
    "register_backend": "klformer.ops.spectral_product",
    "register_spectrum": "klformer.attention",
    "register_task": "klformer.lab.tasks",
    "resample": "klformer.noise",
    "spectral_product": "klformer.ops.spectral_product",
    "use_backend": "klformer.ops.spectral_product",
    "without_noise": "klformer.noise",
}

#: Packages that are there after `import klformer`, as the docs write them.
_PACKAGES = ("attention", "conversion", "distributed", "kernels", "lab", "models", "nn", "ops")

if not TYPE_CHECKING:  # a type checker would take it for a promise of any name

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return import_module(f"klformer.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'klformer' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        # The next time, it is found without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


autoload.register()
