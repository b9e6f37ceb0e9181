"""The attentions that are registered when this is imported, by what they can do."""

import pytest
import torch

import klformer
from klformer.attention.spectral import SpectralAttention
from klformer.noise import has_noise
from klformer.testing.problems import build

NAMES = klformer.attention_names()
MECHANISMS = {name: build(name) for name in NAMES}
KERNELS = [name for name, mechanism in MECHANISMS.items() if isinstance(mechanism, SpectralAttention)]
CROSS = [name for name, mechanism in MECHANISMS.items() if mechanism.supports_cross]
CAUSAL = [name for name, mechanism in MECHANISMS.items() if mechanism.supports_causal]
DECODING = [name for name, mechanism in MECHANISMS.items() if mechanism.supports_decoding]
LEARNED = [name for name in KERNELS if "frozen" in klformer.attention_options(name)]
WITH_FREQUENCIES = [name for name in NAMES if "num_frequencies" in klformer.attention_options(name)]
WITH_NOISE = [name for name, mechanism in MECHANISMS.items() if has_noise(mechanism)]

#: Kernels with options that are not the usual ones, each of them at least once: for contracts that they could break.
VARIANTS = [
    "gmm-prf:envelope=matched,coupling=antithetic,covariance=full",
    "gmm-prf:envelope=simplex,weights=learned,learn_temperature=true",
    "gmm-rks:tied=false,weights=learned,learn_smoothing=true,coupling=orthogonal",
    "fastfood-prf:envelope=simplex,coupling=antithetic,init=released",
    "fastfood-rks:learn=s,learn_temperature=true,redraw=false",
    "generative-prf:envelope=simplex,coupling=orthogonal",
    "atoms-prf:envelope=gaussian,norm_coefficient=0.5,start=gmm",
]

every_attention = pytest.mark.parametrize("name", NAMES)
#: Every attention as it can be used: not all have a causal form.
every_direction = pytest.mark.parametrize(
    ("name", "causal"),
    [(name, False) for name in NAMES] + [(name, True) for name in CAUSAL],
    ids=NAMES + [f"{name}-causal" for name in CAUSAL],
)
#: The same with variants, all of which have a causal form.
every_direction_and_variant = pytest.mark.parametrize(
    ("name", "causal"),
    [(name, False) for name in NAMES + VARIANTS] + [(name, True) for name in CAUSAL + VARIANTS],
    ids=NAMES + VARIANTS + [f"{name}-causal" for name in CAUSAL + VARIANTS],
)


def gradients(x):
    """Of the operands; what a mechanism does not use has gradient 0."""
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in x]
