"""The folder of a run: what is in it, what its readers get, and formats of another number."""

import json

import pytest
from run_support import contents, tiny

from klformer.errors import FileError, RunError, UserError
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.load import load_run
from klformer.lab.runs.train import finished_result, train_run
from klformer.lab.training.metrics import Metric
from klformer.lab.training.progress import SilentReporter


@pytest.fixture
def run(tmp_path):
    train_run(tiny(tmp_path, max_steps=4), tmp_path / "run", resume=False, reporter=SilentReporter())
    return RunFolder(tmp_path / "run")


def test_a_run_says_what_it_is(run, tmp_path):
    assert run.is_run()
    assert run.config() == tiny(tmp_path, max_steps=4)
    assert next(iter(run.config_json().items())) == ("format", 2)
    assert run.config_json()["training"]["max_steps"] == 4
    assert [line["step"] for line in run.metrics("train")] == [1, 2, 3, 4]
    assert [line["step"] for line in run.metrics("validation")] == [4]
    assert len(run.metrics()) == 5
    assert run.result()["steps"] == 4
    assert run.checkpoints(print).newest("step").step == 4
    assert "embedding.cls_token" in run.initial_weights()


def test_a_run_says_what_its_task_is_to_readers_that_do_not_know_it(run):
    assert json.loads((run.path / "task.json").read_text()) == {
        "name": "sparsity",
        "title": "Sparsity",
        "label": "Sparsity 0.5",
        "chance": 1 / 9,
        "metric": {"name": "accuracy", "higher_is_better": True, "percent": True},
        "classes": [],
    }
    facts = run.task_facts()
    assert facts.label == "Sparsity 0.5"
    assert facts.metric == Metric("accuracy", higher_is_better=True, percent=True)


def test_a_folder_is_made_of_what_the_class_names_and_nothing_else(run):
    names = {getattr(RunFolder, name) for name in vars(RunFolder) if name.isupper()} - {
        RunFolder.SUBFOLDERS,
        RunFolder.RECORD,
    }
    assert {path.name for path in run.path.iterdir()} == names


def test_a_run_of_another_format_is_refused_by_its_number(run, tmp_path):
    path, config = run.path / RunFolder.CONFIG, run.config_json()
    for found, content in [
        (1, {key: value for key, value in config.items() if key != "format"}),
        (3, config | {"format": 3}),
    ]:
        path.write_text(json.dumps(content))
        before = contents(run.path)
        message = f"run has format {found}, this klformer reads format 2; read it with the version that wrote it"
        for read in (
            run.config,
            run.config_json,
            lambda: load_run(run.path, SilentReporter()),
            lambda: finished_result(tiny(tmp_path), run.path),
            lambda: train_run(tiny(tmp_path), run.path, resume=True, reporter=SilentReporter()),
        ):
            with pytest.raises(RunError, match=message):
                read()
        assert contents(run.path) == before


def test_what_is_no_run_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    assert not folder.is_run()
    assert folder.result() is None
    assert folder.metrics() == []
    for read in (folder.config, folder.config_json):
        with pytest.raises(RunError, match=r"is not a run: it has no config\.json"):
            read()
    with pytest.raises(FileError, match=r"can't read .*task\.json: .*No such file"):
        folder.task_facts()


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "x"}'])
def test_damaged_files_are_named(run, content):
    (run.path / RunFolder.TASK).write_text(content)
    with pytest.raises(UserError, match=r"task\.json (is damaged|is not JSON|must hold an object)"):
        run.task_facts()
    if content != '{"name": "x"}':
        for name, read in [(RunFolder.RESULT, run.result), (RunFolder.CONFIG, run.config_json)]:
            (run.path / name).write_text(content)
            with pytest.raises(FileError, match=f"{name} (is not JSON|must hold an object)"):
                read()
