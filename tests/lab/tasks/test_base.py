"""The configuration, the protocols and the limits, on a task made of nothing but numbers."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from user_support import plain_user

from klformer.errors import ArgumentError, DataError
from klformer.lab.data import Examples, Sequences
from klformer.lab.tasks import TASKS, DataConfig, Split, Task, build_task, task_names


class Numbers(Task):
    """Sequences that are their own number: train from 0, test from 1000."""

    name = "numbers"
    summary = "numbers"
    num_classes = 7
    vocab_size = 2000
    default_max_len = 1

    def location(self):
        return "nowhere"

    def read(self, part):
        start, size = {"train": (0, 200), "test": (1000, 50)}[part]
        numbers = np.arange(start, start + size)
        return Examples(Sequences.from_matrix(numbers[:, None]), numbers % 7)


def numbers(split, **config):
    return Numbers(DataConfig(**config)).load(split).first.values.ravel().tolist()


def test_registry():
    assert task_names()[:5] == ["listops", "text", "retrieval", "image", "sparsity"]
    with pytest.raises(ValueError, match="unknown task 'listop'; did you mean 'listops'"):
        build_task("listop", DataConfig())


@pytest.mark.parametrize("name", task_names())
def test_every_task_says_what_it_is(name, tmp_path):
    task = build_task(name, TASKS[name].data_config(root=tmp_path), quiet=True)
    assert task.name == name
    assert isinstance(task, TASKS[name])
    assert task.summary
    if type(task).shape is Task.shape:  # others know only when they have read something
        assert (task.shape().vocab_size is None) != (task.shape().input_dim is None)
    assert task.max_len == task.default_max_len
    assert ("memory" if task.in_memory else str(tmp_path)) in task.location()
    assert "validation" in task.describe_protocol()
    assert build_task(name, TASKS[name].data_config(root=tmp_path, max_len=37)).max_len == 37
    assert not list(tmp_path.iterdir()), "asking about a task must not make files"


@pytest.fixture
def no_generation(monkeypatch):
    """Generating is an error: what can't be written must be known before."""

    def refused(*_, **__):
        raise AssertionError("generated before it was known that it can be written")

    monkeypatch.setattr("klformer.lab.tasks.sparsity.generate", refused)
    monkeypatch.setattr("klformer.lab.tasks.listops.ExpressionGenerator", refused)


WITH_FILES = [name for name in task_names() if not TASKS[name].in_memory]
GENERATED = [name for name in WITH_FILES if TASKS[name].is_generated]


@pytest.mark.parametrize("name", GENERATED)
def test_a_place_that_can_not_be_written_is_known_before_generating(name, tmp_path, monkeypatch, no_generation):
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=r"file.*: can't be written: Not a directory; data\.root must be a folder where that is allowed"
    ):
        build_task(name, TASKS[name].data_config(root=tmp_path / "file"), quiet=True).prepare()
    with pytest.raises(DataError, match=r"can't be looked for: File name too long"):
        build_task(name, TASKS[name].data_config(root=tmp_path / ("x" * 300)), quiet=True).prepare()
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "read-only").mkdir(mode=0o555)
    with plain_user(), pytest.raises(DataError, match=r"read-only/.*: can't be written: Permission denied"):
        build_task(name, TASKS[name].data_config(root=Path("read-only")), quiet=True).prepare()


@pytest.mark.parametrize("name", WITH_FILES)
def test_the_root_must_be_a_folder_that_can_be_entered(name, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file: is no folder; data\.root must be the folder that the data is in"):
        build_task(name, TASKS[name].data_config(root=tmp_path / "file"), quiet=True).load("train")
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "locked").mkdir(mode=0)
    task = build_task(name, TASKS[name].data_config(root=Path("locked")), quiet=True)
    with plain_user():
        for look in (task.location, lambda: task.load("train")):
            with pytest.raises(DataError, match=r"locked/.*: can't be looked for: Permission denied"):
                look()


def test_root(monkeypatch, tmp_path):
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path / "chosen"))
    assert DataConfig(root=tmp_path).folder() == tmp_path
    assert DataConfig().folder() == tmp_path / "chosen"
    monkeypatch.delenv("KLFORMER_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert DataConfig().folder() == tmp_path / "cache" / "klformer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DataConfig().folder() == tmp_path / ".cache" / "klformer"
    assert DataConfig(root=Path("~/data")).folder() == tmp_path / "data"


@pytest.mark.parametrize(
    "wrong",
    [
        {"holdout_fraction": 0.0},
        {"holdout_fraction": 1.0},
        {"protocol": "other"},
        {"max_len": 0},
        {"train_limit": 0},
        {"seed": -1},
        {"unknown": 1},
    ],
)
def test_bad_configurations_are_refused(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        DataConfig(**wrong)


def test_configuration_round_trip(tmp_path):
    config = DataConfig(root=tmp_path, train_limit=5)
    assert DataConfig.model_validate_json(config.model_dump_json()) == config
    assert all(field.description for field in DataConfig.model_fields.values())


def test_holdout_leaves_test_alone():
    train, validation, test = (numbers(split) for split in get_args(Split))
    assert sorted(train + validation) == list(range(200))
    assert len(validation) == 20
    assert test == list(range(1000, 1050))
    assert numbers("validation") == validation
    assert numbers("validation", seed=1) != validation
    assert len(numbers("validation", holdout_fraction=0.25)) == 50


def test_lra_validates_on_test():
    assert numbers("train", protocol="lra") == list(range(200))
    assert numbers("validation", protocol="lra") == numbers("test", protocol="lra") == list(range(1000, 1050))
    assert Numbers(DataConfig(protocol="lra")).describe_protocol() == "validation on the test set (protocol lra)"
    assert "10% of the training set" in Numbers(DataConfig()).describe_protocol()


def test_limits_are_nested_random_subsets():
    few, more = numbers("train", train_limit=10), numbers("train", train_limit=20)
    assert len(few) == 10
    assert set(few) < set(more) < set(numbers("train"))
    assert few != numbers("train", train_limit=10, seed=1)
    assert len(numbers("validation", validation_limit=3)) == 3
    assert len(numbers("test", test_limit=4)) == 4
    assert len(numbers("test", train_limit=4)) == 50


def test_limits_beyond_the_data_are_caps_and_said():
    task = Numbers(DataConfig(train_limit=181, test_limit=50))
    assert [len(task.load(split)) for split in ("train", "test")] == [180, 50]
    assert task.notes() == ["train has 180 examples, fewer than train_limit 181; all are used"]


def test_a_task_without_test_data_holds_out_twice():
    class Single(Numbers):
        def test_source(self):
            return "train"

    config = DataConfig(holdout_fraction=0.25)
    train, validation, test = (Single(config).load(split).first.values.ravel().tolist() for split in get_args(Split))
    assert [len(train), len(validation), len(test)] == [100, 50, 50]
    assert sorted(train + validation + test) == list(range(200))
    assert validation == numbers("validation", holdout_fraction=0.25)
    assert "test on 25% of the training set that are held out" in Single(config).describe_protocol()


def test_too_few_to_hold_out():
    class Single(Numbers):
        def read(self, part):
            return super().read(part).take(np.array([0]))

    with pytest.raises(DataError, match="1 training examples are too few to hold out 1"):
        Single(DataConfig()).load("train")


def test_wrong_requests():
    with pytest.raises(ValueError, match="split must be one of 'train', 'validation', 'test', got 'val'"):
        Numbers(DataConfig()).load("val")
    with pytest.raises(ValueError, match="num_examples"):
        DataConfig(num_examples=5)
    with pytest.raises(TypeError, match="the data of sparsity must be a SparsityData, got a DataConfig"):
        build_task("sparsity", DataConfig())
