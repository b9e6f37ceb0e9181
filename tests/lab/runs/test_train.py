"""Runs from beginning to end, and read back."""

import json
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from run_support import Listener, assert_same_state, tiny, train_command
from safetensors.torch import load_file

import klformer
from klformer.errors import RunError
from klformer.lab.runs.config import build_model, preset
from klformer.lab.runs.load import load_run
from klformer.lab.runs.naming import run_name
from klformer.lab.runs.train import train_run
from klformer.lab.tasks import TASKS
from klformer.lab.training.log import read_lines
from klformer.lab.training.progress import SilentReporter
from klformer.models import AttentionSpec


def test_everything_is_written(tmp_path):
    config, folder = tiny(tmp_path), tmp_path / "run"
    listener = Listener()
    result = train_run(config, folder, resume=False, reporter=listener)
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["test"]["draws"] == 3
    assert len(result["test"]["accuracy_by_draw"]) == 3
    assert result["validation"]["num_examples"] == 45
    assert any(folder.glob("tensorboard/events*"))
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-00000009", "step-00000010"}
    assert 1 <= len(list((folder / "checkpoints").glob("best-*"))) <= 2
    kinds = [line["kind"] for line in read_lines(folder / "metrics.jsonl")]
    assert kinds.count("train") == 10
    assert kinds.count("validation") == 3
    assert any("length buckets" in message for message in listener.said)
    assert set(load_file(folder / "initial.safetensors")) == set(
        load_file(next((folder / "checkpoints").glob("best-*/w*")))
    )
    assert not list(folder.glob(".*"))


def test_a_run_reads_back_and_evaluates_the_same(tmp_path):
    config, folder = tiny(tmp_path), tmp_path / "run"
    result = train_run(config, folder, resume=False, reporter=SilentReporter())
    again = load_run(folder, SilentReporter()).evaluate("test", draws=3)
    assert again.as_dict() == result["test"]
    with pytest.raises(RunError, match=r"is not a run: it has no config\.json"):
        load_run(tmp_path, SilentReporter())


def test_speed_does_not_count_evaluation(tmp_path):
    config = tiny(tmp_path, log_every=5, evaluate_every=4)
    result = train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())
    speeds = [r["tokens_per_second"] for r in read_lines(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    seconds = sum(5 * 16 * 9 / speed for speed in speeds)  # 5 steps of 16 sequences of 9 tokens
    assert len(speeds) == 2
    assert seconds == pytest.approx(result["train_seconds"])
    assert result["tokens_per_second"] == pytest.approx(10 * 16 * 9 / result["train_seconds"])
    assert result["train_processor_seconds"] > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can forget the peak of a process")
def test_peak_memory_is_the_runs_own(tmp_path):
    torch.ones(150 * 2**20).sum()  # 600 MiB, given back
    before = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = train_run(tiny(tmp_path, max_steps=2), tmp_path / "run", resume=False, reporter=SilentReporter())
    assert result["peak_memory_bytes"] < before - 300 * 2**20


def test_other_data_is_not_taken_for_the_runs(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    train_run(config, folder, resume=False, reporter=SilentReporter())
    recorded = json.loads((folder / "data.json").read_text())
    recorded["test"]["sha256"] = "0" * 64
    (folder / "data.json").write_text(json.dumps(recorded))
    with pytest.raises(RunError, match=r"other data: test was 45 examples \(sha256 0{12}\), is 45 examples"):
        load_run(folder, SilentReporter()).evaluate("test", draws=1)
    load_run(folder, SilentReporter()).evaluate("validation", draws=1)
    load_run(folder, SilentReporter(), data_root=tmp_path / "data").evaluate("test", draws=1)


def test_a_configuration_that_does_not_fit_the_weights_is_named(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    train_run(config, folder, resume=False, reporter=SilentReporter())
    wider = config.model_copy(update={"model": config.model.model_copy(update={"ffn_dim": 11})})
    (folder / "config.json").write_text(wider.to_json())
    with pytest.raises(
        RunError,
        match=r"run/checkpoints/best-\d+ does not fit the configuration: \S+ is \(8, 8\) in it, \(11, 8\) in the model",
    ):
        load_run(folder, SilentReporter())


def test_the_weights_a_run_started_from(tmp_path):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path, max_steps=2), folder, resume=False, reporter=SilentReporter())
    loaded, stored = load_run(folder, SilentReporter()), folder / "initial.safetensors"
    assert_same_state(loaded.at_start().state_dict(), load_file(stored))
    assert not torch.equal(loaded.at_start().embedding.inputs.weight, loaded.model.embedding.inputs.weight)
    stored.write_bytes(stored.read_bytes()[:100])
    with pytest.raises(RunError, match=r"initial\.safetensors is damaged: "):
        loaded.at_start()
    stored.unlink()
    with pytest.raises(RunError, match=r"initial\.safetensors is not there"):
        loaded.at_start()


def test_accumulation_and_padding_do_not_change_the_run(tmp_path):
    logs = []
    for name, change in [("plain", {}), ("parts", {"accumulation": 3}), ("padded", {"pad_to_longest": True})]:
        config = tiny(tmp_path, max_steps=6, **change)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dropout": 0.0})})
        train_run(config, tmp_path / name, resume=False, reporter=SilentReporter())
        logs.append([r["loss"] for r in read_lines(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"])
    np.testing.assert_allclose(logs[1], logs[0], rtol=1e-5)
    np.testing.assert_allclose(logs[2], logs[0], rtol=1e-5)


def test_mixed_precision_trains(tmp_path):
    command = [*train_command(tmp_path, "run"), "--training.mixed-precision", "bf16"]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 10


def test_epochs_count(tmp_path):
    config = tiny(tmp_path, max_steps=None, max_epochs=2, batch_size=100)
    # 360 examples in batches of 100: the last has 60.
    assert train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())["steps"] == 8


def test_names_of_runs(tmp_path):
    assert run_name(tiny(tmp_path, "gmm-rks")) == "sparsity0.5-laptop-gmm-rks-seed0"
    assert run_name(tiny(tmp_path)) == "sparsity0.5-laptop-gmm-rks-num_frequencies=8-seed0"
    assert run_name(tiny(tmp_path, "gmm-rks:frozen=true")) == "sparsity0.5-laptop-gmm-rks-frozen=true-seed0"


@pytest.mark.parametrize("task", ["listops", "text", "retrieval", "image", "sparsity"])
@pytest.mark.parametrize("name", klformer.attention_names())
def test_the_papers_models_take_a_step(task, name):
    """Every model of the `paper` preset at its full size, two short examples, forward, backward and a step."""
    config = preset("paper", task, AttentionSpec(name=name))
    built = TASKS[task](config.data)
    model = build_model(config, built)
    length = 24
    tokens = torch.randint(1, built.vocab_size, (2, length)) if built.vocab_size else torch.rand(2, length, 3).round()
    key_mask = torch.arange(length) < torch.tensor([[length], [length - 5]])
    inputs = (tokens, tokens, key_mask, key_mask) if built.is_pair else (tokens, key_mask)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    loss = torch.nn.functional.cross_entropy(model(*inputs), torch.tensor([0, 1]))
    loss.backward()
    optimiser.step()
    assert loss.isfinite()
    assert all(p.isfinite().all() for p in model.parameters())
