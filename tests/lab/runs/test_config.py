"""Configurations: presets are the paper's tables, JSON comes back, nonsense is refused by name."""

import json

import pytest
from pydantic import ValidationError

import klformer
from klformer.config import describe_problems
from klformer.lab.runs.config import ExperimentConfig, preset, preset_names
from klformer.lab.tasks import task_names
from klformer.models import AttentionSpec

#: Tasks with the paper's settings for Long Range Arena and its sparsity task.
PAPER = ("listops", "text", "retrieval", "image", "sparsity")
PAPERS_SIX = ("gmm-rks", "fastfood-rks", "generative-rks", "gmm-prf", "fastfood-prf", "generative-prf")


@pytest.mark.parametrize(("task", "name"), [(task, name) for task in task_names() for name in preset_names(task)])
@pytest.mark.parametrize("attention", klformer.attention_names())
def test_every_preset_exists_and_survives_json(name, task, attention, tmp_path):
    config = preset(name, task, AttentionSpec(name=attention))
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    assert ExperimentConfig.from_file(path) == config


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("listops", [512, 64, 256, 512, 64, 128]),
        ("text", [256, 64, 256, 512, 64, 128]),
        ("retrieval", [128, 32, 128, 256, 32, 64]),
        ("image", [256, 8, 128, 256, 8, 8]),
        ("sparsity", [128, 64, 64, 128, 64, 64]),
    ],
)
def test_frequencies_of_the_paper(task, expected):
    """M of the paper's table, times two components for the mixtures."""
    configs = [preset("paper", task, AttentionSpec(name=name)) for name in PAPERS_SIX]
    assert [config.attention.options["num_frequencies"] for config in configs] == expected


def test_linformers_rank_is_that_of_long_range_arena():
    linformer = AttentionSpec(name="linformer")
    ranks = {task: preset("paper", task, linformer).attention.options["rank"] for task in PAPER}
    assert ranks == dict.fromkeys(PAPER, 16) | {"text": 32}
    assert preset("laptop", "text", linformer).attention.options["rank"] == 16
    chosen = AttentionSpec.parse("linformer:rank=8")
    assert preset("paper", "text", chosen).attention.options["rank"] == 8


def test_sizes_of_the_paper():
    text = preset("paper", "text", AttentionSpec(name="gmm-rks"))
    assert (text.model.num_layers, text.model.num_heads, text.model.model_dim, text.model.head_dim) == (4, 4, 256, 64)
    assert (text.optimiser.learning_rate, text.schedule.warmup_steps, text.training.max_steps) == (5e-2, 8000, 20_000)
    image = preset("paper", "image", AttentionSpec(name="gmm-rks"))
    assert (image.training.batch_size, image.training.max_epochs, image.optimiser.weight_decay) == (256, 200, 0.0)
    assert (image.schedule.kind, image.model.dropout, image.model.positions) == ("cosine", 0.3, "learned")
    retrieval = preset("paper", "retrieval", AttentionSpec(name="gmm-rks"))
    assert (retrieval.model.head_hidden_dim, retrieval.model.pair_features) == (512, "concat")
    sparsity = preset("paper", "sparsity", AttentionSpec(name="gmm-prf"))
    assert (sparsity.training.batch_size, sparsity.optimiser.learning_rate, sparsity.model.head_dim) == (400, 5e-6, 16)
    assert all(preset("paper", t, AttentionSpec(name="gmm-rks")).training.resample_every == 100 for t in PAPER)


def test_attentions_with_options():
    parsed = AttentionSpec.parse("gmm-prf:frozen=true,num_frequencies=8,init=identity")
    assert parsed == AttentionSpec(name="gmm-prf", options={"frozen": True, "num_frequencies": 8, "init": "identity"})
    assert AttentionSpec.parse(parsed.label()) == parsed
    assert AttentionSpec.parse("softmax").label() == "softmax"
    generative = AttentionSpec.parse("generative-rks:hidden_dims=[8,16],num_frequencies=4")
    assert generative.options == {"hidden_dims": (8, 16), "num_frequencies": 4}
    assert AttentionSpec.parse(generative.label()) == generative
    assert AttentionSpec.parse("gmm-rks:frozen=True") == AttentionSpec.parse("gmm-rks:frozen=true")
    chosen = preset("laptop", "text", parsed).attention.options | {"backend": "auto"}
    assert chosen == klformer.attention_options("gmm-prf") | {"num_frequencies": 8, "frozen": True, "init": "identity"}


def test_a_run_keeps_the_defaults_it_was_made_with(tmp_path, monkeypatch):
    made = preset("laptop", "text", AttentionSpec(name="fastfood-prf"))
    path = tmp_path / "config.json"
    path.write_text(made.to_json())
    changed = klformer.attention_options("fastfood-prf") | {"lengthscale": 3.0}
    for module in ("attention.spec", "lab.runs.config"):
        monkeypatch.setattr(f"klformer.{module}.attention_options", lambda name: changed)
    assert preset("laptop", "text", AttentionSpec(name="fastfood-prf")).attention.options["lengthscale"] == 3.0
    assert ExperimentConfig.from_file(path).attention.options["lengthscale"] == "auto"


def test_a_file_from_before_an_option_has_its_default(tmp_path):
    made = preset("laptop", "text", AttentionSpec(name="gmm-rks"))
    content = json.loads(made.to_json())
    content["attention"]["options"] = {"num_frequencies": made.attention.options["num_frequencies"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    assert ExperimentConfig.from_file(path) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gmm-rsk", "did you mean 'gmm-rks'"),
        ("gmm-rks:frozen", "key=value, got 'frozen'"),
        ("gmm-rks:frosen=true", "no option 'frosen'; did you mean 'frozen'"),
        ("gmm-rks:frozen=true,frozen=false", "an option is given once, got 'frozen' twice"),
        ("softmax:frozen=true", "softmax has no option 'frozen'"),
    ],
)
def test_bad_attentions_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec.parse(text)


def test_unknown_keys_and_bad_values_are_refused():
    config = preset("laptop", "text", AttentionSpec(name="gmm-rks")).model_dump()
    with pytest.raises(ValidationError) as caught:
        ExperimentConfig.model_validate(config | {"sede": 1})
    assert describe_problems(caught.value) == "sede: Extra inputs are not permitted, got 1"
    config["model"]["dropout"] = 2.0
    with pytest.raises(ValidationError) as caught:
        ExperimentConfig.model_validate(config)
    assert describe_problems(caught.value) == "model.dropout: Input should be less than 1, got 2.0"
    config["model"]["dropout"] = 0.0
    config["optimiser"]["weight_decay"] = float("inf")
    with pytest.raises(ValidationError) as caught:
        ExperimentConfig.model_validate(config)
    assert describe_problems(caught.value) == "optimiser.weight_decay: Input should be a finite number, got inf"


def test_a_run_must_end():
    config = preset("laptop", "text", AttentionSpec(name="gmm-rks")).model_dump()
    config["training"] |= {"max_steps": None, "max_epochs": None}
    with pytest.raises(ValidationError, match="training never ends"):
        ExperimentConfig.model_validate(config)


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"format": 2}')
    with pytest.raises(ValueError, match=r"config.json: task: Field required"):
        ExperimentConfig.from_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config.json: Invalid JSON"):
        ExperimentConfig.from_file(path)


def test_configurations_are_frozen():
    config = preset("laptop", "text", AttentionSpec(name="gmm-rks"))
    with pytest.raises(ValidationError):
        config.seed = 3
    with pytest.raises(ValueError, match="preset must be one of paper, laptop, workstation, got 'desk'"):
        preset("desk", "text", AttentionSpec(name="gmm-rks"))
    with pytest.raises(ValueError, match="unknown task 'words'"):
        preset("paper", "words", AttentionSpec(name="gmm-rks"))
