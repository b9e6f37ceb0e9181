"""Presets are what they were: a checksum of every setting, and what a task without presets gets."""

import hashlib
import json

import pytest
from task_support import Parity

import klformer
from klformer.lab.runs.config import preset, preset_names
from klformer.lab.tasks import TASKS
from klformer.lab.tasks.glue import GLUE_TASKS
from klformer.models import AttentionSpec

#: The settings that a checksum is of. What is added to configurations later has defaults, and is not among them.
SETTINGS = {
    "data": (
        *("protocol", "holdout_fraction", "max_len", "train_limit", "validation_limit", "test_limit", "seed"),
        *("num_examples", "sparsity", "text_column", "label_column"),
    ),
    "model": (
        *("num_layers", "num_heads", "model_dim", "head_dim", "ffn_dim", "head_hidden_dim", "pair_features", "dropout"),
        *("activation", "positions", "checkpoint_layers"),
    ),
    "optimiser": ("learning_rate", "beta1", "beta2", "eps", "weight_decay"),
    "schedule": ("kind", "warmup_steps"),
    "training": (
        *("batch_size", "accumulation", "max_steps", "max_epochs", "clip_norm", "mixed_precision", "resample_every"),
        *("evaluate_every", "checkpoint_every", "keep_checkpoints", "keep_milestones", "evaluation_batch_size"),
        *("evaluation_draws", "log_every", "pad_to_longest"),
    ),
}
#: The attentions at the time of the checksums, each with the options that presets set.
ATTENTIONS = {
    **dict.fromkeys(("gmm-rks", "fastfood-rks", "generative-rks"), ("num_frequencies",)),
    **dict.fromkeys(("gmm-prf", "fastfood-prf", "generative-prf"), ("num_frequencies",)),
    **{"performer": ("num_frequencies",), "linformer": ("rank",), "synthesizer": ("rank",), "softmax": ()},
}
CHECKSUMS = {
    ("listops", "paper"): "15567c1be36ab0d8",
    ("listops", "laptop"): "aa7f02fe1e49c97a",
    ("listops", "workstation"): "4fa4867a8e90ddd7",
    ("text", "paper"): "c389de27916f0de0",
    ("text", "laptop"): "b38dbdf5dae3c4fd",
    ("text", "workstation"): "602a104cda2f7e80",
    ("retrieval", "paper"): "77e3295fc776c45e",
    ("retrieval", "laptop"): "b14373d7643c7c33",
    ("retrieval", "workstation"): "e4b78562095c8554",
    ("image", "paper"): "0c25373f956d5f6e",
    ("image", "laptop"): "98cc5e42d5d2ebde",
    ("image", "workstation"): "c424e6a6f61d234b",
    ("sparsity", "paper"): "2448a1b00e397a1d",
    ("sparsity", "laptop"): "af55c21e76056ff5",
}


def checksum(task, name):
    """Of all settings, and of the attentions' options."""
    config = json.loads(preset(name, task, AttentionSpec(name="softmax")).to_json())
    content = {
        section: {key: config[section][key] for key in keys if key in config[section]}
        for section, keys in SETTINGS.items()
    }
    content["attention"] = {
        attention: {key: preset(name, task, AttentionSpec(name=attention)).attention.options[key] for key in keys}
        for attention, keys in ATTENTIONS.items()
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("task", "name"), CHECKSUMS)
def test_presets_are_what_they_were(task, name):
    assert checksum(task, name) == CHECKSUMS[task, name]


#: Settings of the paper's presets that came after the checksums, the same for all attentions.
LATER = {
    "model": {"pooling": "cls", "convolution_width": 0, "token_start": "independent"},
    "optimiser": {"decay_norms_and_biases": True, "kernel_learning_rate_factor": 1.0, "kernel_weight_decay": None},
}
PAPER = [task for task in TASKS if "paper" in preset_names(task)]
#: Options of the paper's kernels in its presets, besides num_frequencies.
RKS = {"smoothing": 1.0, "learn_smoothing": False}
PRF = {"envelope": "gaussian", "norm_coefficient": 1.0}
EVERY = {"frozen": False, "redraw": True, "learn_temperature": False, "coupling": "iid"}
GMM = {"num_components": 2, "tied": True, "init": "released", "weights": "equal"}
FASTFOOD = {"learn": "sgb", "init": "structured", "lengthscale": "auto"}
GENERATIVE = {"noise_dim": None, "hidden_dims": None}
OPTIONS = {
    "gmm-rks": {**EVERY, **GMM, **RKS, "covariance": "full"},
    "fastfood-rks": {**EVERY, **FASTFOOD, **RKS},
    "generative-rks": {**EVERY, **GENERATIVE, **RKS},
    "gmm-prf": {**EVERY, **GMM, **PRF, "covariance": "diagonal"},
    "fastfood-prf": {**EVERY, **FASTFOOD, **PRF},
    "generative-prf": {**EVERY, **GENERATIVE, **PRF},
    "performer": {"coupling": "orthogonal", "norm_coefficient": 0.5, "envelope": "gaussian", "lengthscale": 1.0},
}


@pytest.mark.parametrize("task", PAPER)
def test_the_papers_presets_are_held_whole(task):
    config = preset("paper", task, AttentionSpec(name="softmax"))
    for section, values in LATER.items():
        held = getattr(config, section)
        assert {key: getattr(held, key) for key in values} == values, section
    is_glue = task in GLUE_TASKS
    assert config.schedule.warmup_fraction == (0.1 if is_glue else 0.0)
    for attention, expected in OPTIONS.items():
        options = preset("paper", task, AttentionSpec(name=attention)).attention.options
        assert {key: options[key] for key in expected} == expected, attention
        if is_glue or task == "corpus":
            assert options["num_frequencies"] == 128


def test_every_preset_of_these_tasks_has_a_checksum():
    tasks = dict.fromkeys(task for task, _ in CHECKSUMS)
    assert {(task, name) for task in tasks for name in preset_names(task)} == set(CHECKSUMS)


def test_every_preset_of_the_paper_smooths_and_decays_as_the_authors_do():
    for task in TASKS:
        for name in preset_names(task):
            config = preset(name, task, AttentionSpec(name="gmm-rks"))
            settings = (config.attention.options["smoothing"], config.optimiser.kernel_weight_decay)
            assert settings == ((1.0, None) if name == "paper" else (0.1, 0.0)), (task, name)


@pytest.mark.parametrize("attention", klformer.attention_names())
def test_the_settings_do_not_depend_on_the_attention(attention):
    config, plain = (preset("paper", "text", AttentionSpec(name=name)) for name in (attention, "softmax"))
    assert config.model_copy(update={"attention": plain.attention}) == plain


def test_a_task_without_presets_has_one_for_a_laptop(own_tasks):
    own_tasks(Parity)
    assert preset_names("parity") == ["laptop"]
    config = preset("laptop", "parity", AttentionSpec(name="gmm-rks"))
    assert config.attention.options["num_frequencies"] == 64
    assert config.training.max_steps == 1000
    with pytest.raises(ValueError, match="preset must be one of laptop, got 'paper', which parity lacks"):
        preset("paper", "parity", AttentionSpec(name="gmm-rks"))


def test_a_task_names_its_own_presets(own_tasks):
    class Named(Parity):
        presets = {  # noqa: RUF012
            "tiny": {
                "training": {"max_steps": 3},
                "attention": {"*": {"num_frequencies": 6}, "gmm-rks": {"frozen": True}},
            }
        }

    own_tasks(Named)
    assert preset_names("parity") == ["tiny", "laptop"]
    options = {
        name: preset("tiny", "parity", AttentionSpec(name=name)).attention.options
        for name in ("gmm-rks", "gmm-prf", "softmax")
    }
    assert options["gmm-rks"] | {"backend": "auto"} == klformer.attention_options("gmm-rks") | {
        "num_frequencies": 6,
        "frozen": True,
    }
    assert options["gmm-prf"] | {"backend": "auto"} == klformer.attention_options("gmm-prf") | {"num_frequencies": 6}
    assert options["softmax"] == klformer.attention_options("softmax")


@pytest.mark.parametrize(
    ("task", "length"), [("listops", 2_000), ("text", 4_000), ("retrieval", 4_000), ("image", 1_024)]
)
def test_a_workstation_has_the_whole_benchmark(task, length):
    """Its own lengths and all examples; every batch is as long as its own longest sequence."""
    config, laptop = (preset(name, task, AttentionSpec(name="gmm-prf")) for name in ("workstation", "laptop"))
    assert config.data == TASKS[task].data_config()
    assert config.make_task().max_len == length
    assert not config.training.pad_to_longest
    assert config.attention.options["num_frequencies"] == 4 * config.model.head_dim
    assert config.training.max_steps > laptop.training.max_steps
