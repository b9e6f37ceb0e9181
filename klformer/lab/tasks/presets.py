"""Pieces of presets that several tasks share.

A preset is a mapping of sections: data, model, optimiser, schedule and training, each with what it sets, and attention:
options by the attention's name. Options under ANY are for all attentions that have them. `paper` is the paper's tables
"Hyperparameters for LRA tasks" and "Number of random samples M", and its appendix on the sparsity task; `laptop` keeps
the task and the shape of the model and makes everything smaller, for two cores and some minutes; `workstation` has Long
Range Arena's own lengths and all of its examples, for half an hour of one core.
"""

from collections.abc import Mapping
from typing import Any

Section = Mapping[str, Any]
Preset = Mapping[str, Section]

#: All attentions that have the option.
ANY = "*"
SECTIONS = ("data", "model", "optimiser", "schedule", "training", "attention")

LRA_OPTIMISER: Section = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-9, "weight_decay": 0.1}
#: The authors' constant, which the paper does not name.
PAPER_SMOOTHING = 1.0
#: With weight decay on everything, the kernels too.
PAPER_OPTIMISER: Section = {**LRA_OPTIMISER, "kernel_weight_decay": None}

#: New frequencies every step: with the paper's 100, a short run adapts to the few samples it sees.
SMALL_TRAINING: Section = {"clip_norm": 1.0, "resample_every": 1, "evaluation_draws": 10}

#: The laptop preset has the same number of frequencies for all kernels, so that they are compared at equal cost: four
#: for each dimension of its heads of 16.
LAPTOP_ATTENTION: Section = {ANY: {"num_frequencies": 64}}

#: For tasks that say nothing of a laptop: the sizes are those of the configuration itself.
LAPTOP_DEFAULT: Preset = {
    "optimiser": {**LRA_OPTIMISER, "learning_rate": 1e-3, "weight_decay": 0.01},
    "schedule": {"kind": "cosine", "warmup_steps": 100},
    "training": {
        **SMALL_TRAINING, "batch_size": 32, "max_steps": 1000, "evaluate_every": 200, "checkpoint_every": 200,
    },
    "attention": LAPTOP_ATTENTION,
}  # fmt: skip


#: For data of one's own, of whatever kind.
LAPTOP_OWN_DATA: Preset = {
    "data": {"stratified": True},
    "model": {
        "num_layers": 2, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 128, "head_hidden_dim": 128,
        "dropout": 0.1, "positions": "learned", "pooling": "mean",
    },
    "optimiser": {**LRA_OPTIMISER, "learning_rate": 1e-3, "weight_decay": 0.01},
    "schedule": {"kind": "cosine", "warmup_steps": 100},
    "training": {
        **SMALL_TRAINING, "batch_size": 32, "max_steps": 1500, "evaluate_every": 100, "checkpoint_every": 100,
    },
    "attention": LAPTOP_ATTENTION,
}  # fmt: skip


#: What the laptop presets of Long Range Arena's tasks share.
_LAPTOP_LRA: Preset = {
    "model": {
        "num_layers": 1, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 128, "head_hidden_dim": 128,
        "dropout": 0.0, "convolution_width": 5, "pooling": "mean",
    },
    "optimiser": {**LRA_OPTIMISER, "learning_rate": 6e-3, "weight_decay": 0.01},
    "schedule": {"kind": "cosine", "warmup_steps": 100},
    "training": {**SMALL_TRAINING, "evaluation_draws": 4},
    "attention": LAPTOP_ATTENTION,
}  # fmt: skip


def lra_presets(*, paper: Preset, laptop: Preset, workstation: Preset) -> Mapping[str, Preset]:
    """Return the presets of a task of Long Range Arena: `paper` as it stands, and what differs from _LAPTOP_LRA in
    `laptop`, and from `laptop` with all of the data in `workstation`."""
    small = _replaced(_LAPTOP_LRA, laptop)
    # Long sequences a few at a time: 64 of 4,000 tokens take gigabytes.
    training = {**small["training"], "evaluation_draws": 2, "evaluation_batch_size": 16}
    whole = _replaced({**small, "data": {}, "training": training}, workstation)
    return {"paper": paper, "laptop": small, "workstation": whole}


#: The paper's table of hyper-parameters for GLUE; 64 or 128 samples, of which these are the more.
_LANGUAGE_OPTIMISER: Section = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
_PAPER_LANGUAGE: Preset = {
    "data": {"max_len": 512, "tokens": {"kind": "wordpiece", "vocab_size": 30_522}},
    "model": {
        "num_layers": 3, "num_heads": 10, "model_dim": 300, "head_dim": 64, "ffn_dim": 512, "head_hidden_dim": 128,
        "head_activation": "tanh", "dropout": 0.1, "positions": "sinusoidal", "pooling": "cls",
    },
    "optimiser": {**_LANGUAGE_OPTIMISER, "kernel_weight_decay": None},
    "schedule": {"kind": "linear"},
    "training": {"batch_size": 64},
    "attention": {ANY: {"num_frequencies": 128, "smoothing": PAPER_SMOOTHING}},
}  # fmt: skip
#: Small enough for 6,000 steps in a quarter of an hour of one core. With a convolution every token sees its neighbours,
#: which no linear attention found by itself in 1,200 steps, and softmax only with rotary positions.
_LAPTOP_LANGUAGE: Preset = {
    "data": {"max_len": 64},
    "model": {
        "num_layers": 2, "num_heads": 4, "model_dim": 128, "head_dim": 32, "ffn_dim": 256, "head_hidden_dim": 128,
        "head_activation": "tanh", "dropout": 0.0, "positions": "rotary", "convolution_width": 5, "pooling": "cls",
    },
    "optimiser": _LANGUAGE_OPTIMISER,
    "schedule": {"kind": "linear"},
    "training": {"batch_size": 32, "clip_norm": 1.0, "resample_every": 1, "evaluation_draws": 3},
    "attention": LAPTOP_ATTENTION,
}  # fmt: skip


def language_presets(*, paper: Preset, laptop: Preset) -> Mapping[str, Preset]:
    """Return the presets of a task of texts: what differs from the paper's, and from those for a laptop."""
    return {"paper": _replaced(_PAPER_LANGUAGE, paper), "laptop": _replaced(_LAPTOP_LANGUAGE, laptop)}


def _replaced(preset: Preset, sections: Preset) -> Preset:
    return {name: {**preset.get(name, {}), **sections.get(name, {})} for name in {**preset, **sections}}


def paper_attention(
    *, gmm_rks: int, fastfood_rks: int, generative_rks: int, gmm_prf: int, fastfood_prf: int, generative_prf: int
) -> dict[str, Section]:
    """Return the paper's numbers of random samples M as options. The mixtures have C = 2 components, by which M noise
    vectors become R = C M frequencies; attentions that the paper does not list have 256. The smoothing is the authors'.
    """
    frequencies = {
        "gmm-rks": 2 * gmm_rks,
        "fastfood-rks": fastfood_rks,
        "generative-rks": generative_rks,
        "gmm-prf": 2 * gmm_prf,
        "fastfood-prf": fastfood_prf,
        "generative-prf": generative_prf,
    }
    for_any = {"num_frequencies": 256, "smoothing": PAPER_SMOOTHING}
    by_name: dict[str, Section] = {name: {"num_frequencies": number} for name, number in frequencies.items()}
    return {ANY: for_any, **by_name}
