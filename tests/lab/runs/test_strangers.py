"""Runs of other people: their configuration steers nothing that the user has not asked for."""

import json
import os
import signal

import pytest
import torch
from run_support import sealed, tiny
from safetensors.torch import load_file, save_file

from klformer.errors import DataError, RunError, UserError
from klformer.files import sha256
from klformer.lab.report.collect import collect
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


READ = [
    "config.json",
    "knowledge.json",
    "data.json",
    "checkpoints/*/manifest.json",
    "checkpoints/*/weights.safetensors",
]


def evaluated(folder):
    load_run(folder, SilentReporter()).examples("test")


@pytest.mark.parametrize("read", [evaluated, lambda folder: collect([folder.parent])])
@pytest.mark.parametrize("name", [*READ, "task.json", "metrics.jsonl", "result.json"])
def test_only_regular_files_are_read(run, name, read):
    """A pipe would be waited for, and a device read, for ever."""
    for path in list(run.glob(name)):
        path.unlink()
        if "*" in name:
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(path)

    def too_long(number, frame):
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    try:
        if read is evaluated and name in READ:
            with pytest.raises(UserError):
                read(run)
        else:
            read(run)
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("name", ["config.json", "knowledge.json", "data.json", "checkpoints/*/manifest.json"])
def test_deep_json_is_refused_in_words(run, name):
    for path in run.glob(name):
        path.write_text('{"a":' * 100_000)
    with pytest.raises(UserError):
        evaluated(run)


def test_weights_that_are_not_finite_tell_nothing(run):
    for folder in run.glob("checkpoints/*"):
        weights = load_file(folder / "weights.safetensors")
        name = min(weights)
        weights[name] = torch.full_like(weights[name], torch.nan)
        save_file(weights, folder / "weights.safetensors")
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["weights.safetensors"] = sha256(folder / "weights.safetensors")
        (folder / "manifest.json").write_text(sealed(manifest))
    with pytest.raises(RunError, match=f"has weights that are not finite numbers, such as {name}"):
        load_run(run, SilentReporter())
