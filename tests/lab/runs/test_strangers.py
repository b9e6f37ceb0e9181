"""Runs of other people: their configuration steers nothing that the user has not asked for."""

import json

import pytest
from run_support import tiny

from klformer.errors import DataError, RunError
from klformer.lab.runs.load import load_run
from klformer.lab.runs.train import train_run
from klformer.lab.training.progress import SilentReporter


@pytest.fixture
def run(tmp_path):
    train_run(tiny(tmp_path, max_steps=2), tmp_path / "run", resume=False, reporter=SilentReporter())
    return tmp_path / "run"


def edit(run, section, **changes):
    config = json.loads((run / "config.json").read_text())
    config[section] |= changes
    (run / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("model", {"model_dim": 10**9}, r"model\.model_dim is 1,000,000,000, it has [\d,]+ numbers"),
        ("model", {"num_layers": 10**9}, r"model\.num_layers is 1,000,000,000"),
        ("model", {"model_dim": 16}, r"does not fit the configuration: .* is \(.*\) in it, \(.*16.*\) in the model"),
        ("data", {"num_examples": 10**12}, r"data\.num_examples = 1,000,000,000,000, more than a run is read with"),
        ("data", {"max_len": 10**12}, r"data\.max_len = 1,000,000,000,000, more than"),
    ],
)
def test_sizes_are_checked_before_anything_is_made(run, section, changes, message):
    edit(run, section, **changes)
    with pytest.raises(RunError, match=message):
        load_run(run, SilentReporter())


def test_data_is_not_generated_wherever_a_configuration_says(run, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    elsewhere = tmp_path / "a" / ".." / "elsewhere"
    edit(run, "data", root=str(elsewhere))
    with pytest.raises(DataError, match=r"is not there; --data-root .*elsewhere generates it there, if you want"):
        load_run(run, SilentReporter()).examples("test")
    assert not (tmp_path / "elsewhere").exists()
    assert len(load_run(run, SilentReporter(), data_root=tmp_path / "elsewhere").examples("test")) == 45
    # What is there is read, whoever says so; and the cache is for everybody.
    assert len(load_run(run, SilentReporter()).examples("test")) == 45
    edit(run, "data", root=None)
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path / "cache"))
    assert len(load_run(run, SilentReporter()).examples("test")) == 45
