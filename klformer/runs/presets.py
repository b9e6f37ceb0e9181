"""Presets as data: `paper` is the paper's tables, `laptop` the same tasks for two cores and some minutes.

`paper`: tables "Hyperparameters for LRA tasks" and "Number of random samples M", and the appendix on the sparsity task.
What the tables leave open is marked below. `laptop` keeps the tasks and the shape of the models and makes everything
smaller.
"""

from typing import Any

from klformer.attention import attention_options
from klformer.errors import ArgumentError
from klformer.models import AttentionSpec
from klformer.runs.config import ExperimentConfig
from klformer.tasks import TASKS

PRESETS = ("paper", "laptop")
#: What commands take if nothing is said.
DEFAULT_TASK, DEFAULT_ATTENTION, DEFAULT_PRESET = "sparsity", "gmm-rks", "laptop"

#: Number of random samples M of each kernel, by task (LRA table); the sparsity task has 64 for its models.
PAPER_SAMPLES: dict[str, dict[str, int]] = {
    "listops": {
        "gmm-rks": 256,
        "fastfood-rks": 64,
        "generative-rks": 256,
        "gmm-prf": 256,
        "fastfood-prf": 64,
        "generative-prf": 128,
    },
    "text": {
        "gmm-rks": 128,
        "fastfood-rks": 64,
        "generative-rks": 256,
        "gmm-prf": 256,
        "fastfood-prf": 64,
        "generative-prf": 128,
    },
    "retrieval": {
        "gmm-rks": 64,
        "fastfood-rks": 32,
        "generative-rks": 128,
        "gmm-prf": 128,
        "fastfood-prf": 32,
        "generative-prf": 64,
    },
    "image": {
        "gmm-rks": 128,
        "fastfood-rks": 8,
        "generative-rks": 128,
        "gmm-prf": 128,
        "fastfood-prf": 8,
        "generative-prf": 8,
    },
    "sparsity": dict.fromkeys(
        ("gmm-rks", "fastfood-rks", "generative-rks", "gmm-prf", "fastfood-prf", "generative-prf"), 64
    ),
}
#: Components C of the mixtures, by which M noise vectors become R = C M frequencies.
COMPONENTS = {"gmm-rks": 2, "gmm-prf": 2}
#: Frequencies of attentions that the paper does not list.
OTHER_FREQUENCIES = 256
#: Where Long Range Arena has another setting for a task than the attention's default, which is its usual one.
PAPER_OPTIONS: dict[tuple[str, str], dict[str, Any]] = {("text", "linformer"): {"rank": 32}}
#: The laptop preset has the same number of frequencies for all kernels, so that they are compared at equal cost.
LAPTOP_FREQUENCIES = 128

_LRA_OPTIMISER = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-9, "weight_decay": 0.1}

PAPER: dict[str, dict[str, Any]] = {
    "listops": {
        "model": {
            "num_layers": 6, "num_heads": 8, "model_dim": 512, "head_dim": 64, "ffn_dim": 2048, "head_hidden_dim": 2048,
            "dropout": 0.1, "positions": "sinusoidal",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 5e-3},
        "schedule": {"kind": "rsqrt", "warmup_steps": 1000},
        "training": {"batch_size": 32, "max_steps": 10_000},
    },
    "text": {
        "model": {
            "num_layers": 4, "num_heads": 4, "model_dim": 256, "head_dim": 64, "ffn_dim": 1024, "head_hidden_dim": 1024,
            "dropout": 0.1, "positions": "sinusoidal",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 5e-2},
        "schedule": {"kind": "rsqrt", "warmup_steps": 8000},
        "training": {"batch_size": 32, "max_steps": 20_000},
    },
    "retrieval": {
        # The classifier has 512 and 256 hidden units.
        "model": {
            "num_layers": 4, "num_heads": 4, "model_dim": 128, "head_dim": 32, "ffn_dim": 512, "head_hidden_dim": 512,
            "dropout": 0.1, "positions": "sinusoidal",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 5e-2},
        "schedule": {"kind": "rsqrt", "warmup_steps": 8000},
        "training": {"batch_size": 32, "max_steps": 5_000},
    },
    "image": {
        "model": {
            "num_layers": 1, "num_heads": 8, "model_dim": 128, "head_dim": 8, "ffn_dim": 128, "head_hidden_dim": 128,
            "dropout": 0.3, "positions": "learned",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 5e-4, "weight_decay": 0.0},
        "schedule": {"kind": "cosine", "warmup_steps": 175},
        "training": {"batch_size": 256, "max_epochs": 200},
    },
    "sparsity": {
        # Left open by the paper: the number of heads (4 = 64 / 16), dropout (0.1) and the number of epochs (100).
        "model": {
            "num_layers": 3, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 64, "head_hidden_dim": 64,
            "dropout": 0.1, "positions": "learned",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 5e-6},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "training": {"batch_size": 400, "max_epochs": 100, "keep_milestones": True},
    },
}  # fmt: skip

#: New frequencies every step: with the paper's 100, a short run adapts to the few samples it sees (docs/decisions.md).
_SMALL_TRAINING = {"clip_norm": 1.0, "resample_every": 1, "evaluation_draws": 10}

LAPTOP: dict[str, dict[str, Any]] = {
    "listops": {
        "data": {"num_examples": 8_000, "max_len": 500, "validation_limit": 1_000},
        "model": {
            "num_layers": 2, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 128, "head_hidden_dim": 128,
            "dropout": 0.0, "positions": "sinusoidal",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 1e-3, "weight_decay": 0.01},
        "schedule": {"kind": "cosine", "warmup_steps": 100},
        "training": {
            **_SMALL_TRAINING, "batch_size": 32, "max_steps": 1000, "evaluate_every": 200, "checkpoint_every": 200,
        },
    },
    "text": {
        # One layer and no dropout: what a byte says of a review is little, and deeper models take longer to find it.
        "data": {"max_len": 1024, "validation_limit": 1_000, "test_limit": 2_000},
        "model": {
            "num_layers": 1, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 128, "head_hidden_dim": 128,
            "dropout": 0.0, "positions": "learned",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 2e-3, "weight_decay": 0.01},
        "schedule": {"kind": "cosine", "warmup_steps": 100},
        "training": {
            **_SMALL_TRAINING, "batch_size": 32, "max_steps": 2500, "evaluate_every": 200, "checkpoint_every": 200,
        },
    },
    "retrieval": {
        # One layer as for Text; the difference of the papers, without which nothing is learned (docs/decisions.md); and
        # a small learning rate, without which softmax learns nothing.
        "data": {"max_len": 256, "train_limit": 16_000, "validation_limit": 500, "test_limit": 2_000},
        "model": {
            "num_layers": 1, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 128, "head_hidden_dim": 128,
            "pair_features": "difference", "dropout": 0.0, "positions": "learned",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 5e-4, "weight_decay": 0.01},
        "schedule": {"kind": "cosine", "warmup_steps": 50},
        "training": {
            **_SMALL_TRAINING, "batch_size": 32, "max_steps": 3000, "evaluate_every": 100, "checkpoint_every": 100,
        },
    },
    "image": {
        "data": {"train_limit": 10_000, "validation_limit": 1_000, "test_limit": 2_000},
        "model": {
            "num_layers": 1, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 128, "head_hidden_dim": 128,
            "dropout": 0.1, "positions": "learned",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 1e-3, "weight_decay": 0.0},
        "schedule": {"kind": "cosine", "warmup_steps": 50},
        "training": {
            **_SMALL_TRAINING, "batch_size": 32, "max_steps": 1000, "evaluate_every": 200, "checkpoint_every": 200,
        },
    },
    "sparsity": {
        "data": {"num_examples": 50_000, "max_len": 64, "validation_limit": 1_000, "test_limit": 2_000},
        "model": {
            "num_layers": 3, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 64, "head_hidden_dim": 64,
            "dropout": 0.0, "positions": "learned",
        },
        "optimiser": {**_LRA_OPTIMISER, "learning_rate": 1e-3, "weight_decay": 0.01},
        "schedule": {"kind": "cosine", "warmup_steps": 100},
        "training": {
            **_SMALL_TRAINING, "batch_size": 64, "max_steps": 2000, "evaluate_every": 100, "checkpoint_every": 200,
            "keep_milestones": True,
        },
    },
}  # fmt: skip


def preset(name: str, task: str, attention: AttentionSpec) -> ExperimentConfig:
    """The full configuration of a preset; options given with the attention replace those of the preset.

    Raises:
        ValueError: there is no such preset, task or attention.
    """
    tables = {"paper": PAPER, "laptop": LAPTOP}
    if name not in tables:
        raise ArgumentError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    TASKS.check(task)
    options = usual_options(name, task, attention.name) | attention.options
    chosen = {"data": {}} | tables[name][task]
    return ExperimentConfig.model_validate(
        {"task": task, "preset": name, "attention": {"name": attention.name, "options": options}, **chosen}
    )


def usual_options(name: str, task: str, attention: str) -> dict[str, Any]:
    """All options of an attention in a preset: its defaults, but for the frequencies and what Long Range Arena sets."""
    defaults = attention_options(attention)
    if "num_frequencies" not in defaults:
        return defaults | (PAPER_OPTIONS.get((task, attention), {}) if name == "paper" else {})
    if name == "laptop":
        return defaults | {"num_frequencies": LAPTOP_FREQUENCIES}
    samples = PAPER_SAMPLES[task].get(attention)
    frequencies = OTHER_FREQUENCIES if samples is None else samples * COMPONENTS.get(attention, 1)
    return defaults | {"num_frequencies": frequencies}
