"""Tasks from anybody's code: registered when complete, and refused with what is missing."""

import json

import pytest
from task_support import Parity, Share

from klformer.errors import ArgumentError
from klformer.lab.runs.compare import comparison_table
from klformer.lab.runs.config import ExperimentConfig, preset
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.load import load_run
from klformer.lab.runs.train import train_run
from klformer.lab.tasks import DataConfig, Task, build_task, register_task, task_names
from klformer.lab.training.progress import SilentReporter
from klformer.models import AttentionSpec

TINY = {"num_layers": 1, "num_heads": 2, "model_dim": 8, "head_dim": 4, "ffn_dim": 8, "head_hidden_dim": 8}


def small(task, attention="gmm-rks:num_frequencies=8", **training):
    config = preset("laptop", task, AttentionSpec.parse(attention)).model_dump()
    config["model"] |= TINY
    config["training"] |= {
        "max_steps": 6,
        "evaluate_every": 3,
        "checkpoint_every": 3,
        "evaluation_draws": 2,
        **training,
    }
    return ExperimentConfig.model_validate(config)


def test_a_registered_task_is_known_at_once(own_tasks):
    assert "parity" not in task_names()
    own_tasks(Parity)
    assert "parity" in task_names()
    task = build_task("parity", DataConfig())
    assert len(task.load("train")) == 180
    assert (task.label(), task.detail(), task.chance) == ("Parity", "", None)
    with pytest.raises(ValueError, match="'parity' is registered already"):
        register_task(Parity)


class Empty(Task):
    pass


class Half(Parity):
    vocab_size, num_classes, default_max_len = None, 1, 0
    name = "two words"
    presets = {"laptop": {"modle": {}}}  # noqa: RUF012


@pytest.mark.parametrize(
    ("task", "missing"),
    [
        (Empty, ["name", "num_classes", "vocab_size and input_dim", "default_max_len", "read"]),
        (Half, ["name", "num_classes", "vocab_size and input_dim", "default_max_len", "not modle"]),
    ],
)
def test_an_incomplete_task_is_refused_with_all_that_is_missing(own_tasks, task, missing):
    with pytest.raises(ArgumentError, match=f"the task {task.__name__} is not complete") as caught:
        own_tasks(task)
    assert all(word in str(caught.value) for word in missing)


def test_only_tasks_are_tasks(own_tasks):
    with pytest.raises(TypeError, match=r"must be a subclass of klformer\.lab\.tasks\.Task"):
        own_tasks(DataConfig)


def test_a_task_of_ones_own_trains(own_tasks, tmp_path):
    own_tasks(Parity)
    result = train_run(small("parity"), tmp_path / "run", resume=False, reporter=SilentReporter())
    assert result["metric"] == "accuracy"
    assert load_run(tmp_path / "run", SilentReporter()).evaluate("test", draws=2).as_dict() == result["test"]


def test_a_regression_trains_goes_on_and_is_selected_by_the_lowest_error(own_tasks, tmp_path):
    own_tasks(Share)
    config, folder = small("share", max_steps=30), RunFolder(tmp_path / "run")
    train_run(small("share", max_steps=15), folder.path, resume=False, reporter=SilentReporter())
    result = train_run(config, folder.path, resume=True, reporter=SilentReporter())
    assert (result["metric"], result["metric_higher_is_better"], result["metric_percent"]) == ("mse", False, False)
    assert {"mse", "mse_std", "mse_by_draw", "combined_mse", "mae", "r2", "combined_r2"} <= result["test"].keys()
    points = folder.metrics("validation")
    best = min(points, key=lambda point: point["mse"])
    assert result["best_step"] == best["step"]
    assert points[-1]["mse"] < points[0]["mse"]
    assert {"loss", "mse", "mae"} <= folder.metrics("train")[0].keys()
    assert folder.task_facts().metric.name == "mse"
    straight = train_run(config, tmp_path / "straight", resume=False, reporter=SilentReporter())
    assert straight["steps"] == 30


def test_a_target_is_reached_from_above_where_less_is_better(own_tasks, tmp_path):
    own_tasks(Share)
    result = train_run(small("share", target=1e9), tmp_path / "a", resume=False, reporter=SilentReporter())
    assert result["steps"] == 3
    result = train_run(small("share", target=1e-9), tmp_path / "b", resume=False, reporter=SilentReporter())
    assert result["steps"] == 6


def test_what_only_accuracies_have_is_refused(own_tasks, tmp_path):
    own_tasks(Share, Parity)
    for config, message in [
        (small("share", keep_milestones=True), "keep_milestones is for accuracies and the like, mse has no"),
        (small("parity", target=80.0), r"training\.target must be above 0 and at most 1 for accuracy, got 80\.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())


def test_a_comparison_has_the_best_first_by_its_metric():
    def result(attention, value):
        split = {"mse": value, "mse_std": 0.0, "combined_mse": value, "draws": 2}
        facts = {"metric": "mse", "metric_higher_is_better": False, "metric_percent": False, "best_step": 1}
        costs = {"tokens_per_second": 1.0, "train_seconds": 1.0, "peak_memory_bytes": 1}
        return (
            {"task": "share", "preset": "laptop", "attention": attention, "protocol": "", "test": split} | facts | costs
        )

    table = comparison_table([result("worse", 0.5), result("better", 0.125)])
    assert "mse on the test set, best first" in table.title
    assert [row[0].text for row in table.rows] == ["better", "worse"]
    assert [row[2].text for row in table.rows] == ["0.125", "0.5"]


def test_options_of_a_task_are_those_of_its_own_class():
    config = json.loads(preset("laptop", "sparsity", AttentionSpec(name="softmax")).to_json())
    assert config["data"]["sparsity"] == 0.5
    assert ExperimentConfig.model_validate(config).data.sparsity == 0.5
    config["data"]["sparsity"] = 1.5
    with pytest.raises(ValueError, match=r"data\s+Value error, sparsity: Input should be less than 1, got 1\.5"):
        ExperimentConfig.model_validate(config)
    other = preset("laptop", "text", AttentionSpec(name="softmax"))
    assert not hasattr(other.data, "sparsity")
    with pytest.raises(ValueError, match="must be a SparsityData, got a TextData"):
        ExperimentConfig.model_validate(config | {"data": other.data})
