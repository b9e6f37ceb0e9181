"""Runs from beginning to end: resumed, killed, interrupted, in two processes, and read back."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from disk_support import small_disk
from safetensors.torch import load_file

import klformer
from klformer.experiments import run as run_module
from klformer.experiments.build import build_model
from klformer.experiments.config import AttentionConfig, ExperimentConfig
from klformer.experiments.presets import preset
from klformer.experiments.run import initial_weights, load_run, make_accelerator, run_name, train_run
from klformer.tasks import TASKS, DataError
from klformer.training import trainer as trainer_module
from klformer.training.checkpoint import CheckpointStore
from klformer.training.errors import Interrupted, TrainingError
from klformer.training.log import read_lines
from klformer.training.progress import SilentReporter

TINY = {
    "data": {"num_examples": 450, "max_len": 9, "validation_limit": 45, "test_limit": 45},
    "model": {"num_layers": 1, "num_heads": 2, "model_dim": 8, "head_dim": 4, "ffn_dim": 8, "head_hidden_dim": 8},
    "training": {
        "batch_size": 16, "max_steps": 10, "evaluate_every": 4, "checkpoint_every": 3, "log_every": 1,
        "resample_every": 2, "evaluation_draws": 3, "clip_norm": 1.0,
    },
    "schedule": {"kind": "constant", "warmup_steps": 3},
}  # fmt: skip
#: The same as flags of the command line.
TINY_FLAGS = [
    f"--{section}.{key.replace('_', '-')}={value}" for section, values in TINY.items() for key, value in values.items()
]


class Listener(SilentReporter):
    def __init__(self):
        self.said = []

    def say(self, message):
        self.said.append(message)


def tiny(tmp_path, attention="gmm-rks:num_frequencies=8", *, schedule="constant", **training):
    base = preset("laptop", "sparsity", AttentionConfig.parse(attention)).model_dump()
    for section, values in TINY.items():
        base[section] |= values
    base["data"]["root"] = tmp_path / "data"
    base["schedule"]["kind"] = schedule
    base["training"] |= training
    return ExperimentConfig.model_validate(base)


def final_state(folder):
    newest = CheckpointStore(folder / "checkpoints", print).newest("step")
    return newest.weights() | {f"optimiser.{k}": v for k, v in newest.optimiser().items()}


def assert_same_state(first, second):
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different


def without_speed(lines):
    return [{k: v for k, v in line.items() if k not in ("tokens_per_second", "seconds")} for line in lines]


@pytest.mark.parametrize("name", klformer.attention_names())
def test_five_and_five_steps_are_ten(name, tmp_path):
    attention = f"{name}:num_frequencies=8" if "num_frequencies" in klformer.attention_options(name) else name
    config = tiny(tmp_path, attention)
    straight = train_run(config, tmp_path / "straight", resume=False, reporter=SilentReporter())
    half = tiny(tmp_path, attention, max_steps=5)
    train_run(half, tmp_path / "resumed", resume=False, reporter=SilentReporter())
    resumed = train_run(config, tmp_path / "resumed", resume=True, reporter=SilentReporter())
    assert_same_state(final_state(tmp_path / "straight"), final_state(tmp_path / "resumed"))
    assert straight["steps"] == resumed["steps"] == 10
    logs = [
        [r for r in read_lines(tmp_path / n / "metrics.jsonl") if r["kind"] == "train"] for n in ("straight", "resumed")
    ]
    assert without_speed(logs[0]) == without_speed(logs[1])


def test_everything_is_written(tmp_path):
    config, folder = tiny(tmp_path), tmp_path / "run"
    listener = Listener()
    result = train_run(config, folder, resume=False, reporter=listener)
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["test"]["draws"] == 3
    assert len(result["test"]["accuracies"]) == 3
    assert result["validation"]["num_examples"] == 45
    assert any(folder.glob("tensorboard/events*"))
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-00000009", "step-00000010"}
    assert 1 <= len(list((folder / "checkpoints").glob("best-*"))) <= 2
    kinds = [line["kind"] for line in read_lines(folder / "metrics.jsonl")]
    assert kinds.count("train") == 10
    assert kinds.count("validation") == 3
    assert any("length buckets" in message for message in listener.said)
    assert set(initial_weights(folder)) == set(load_file(next((folder / "checkpoints").glob("best-*/w*"))))
    assert not list(folder.glob(".*"))


def test_a_run_reads_back_and_evaluates_the_same(tmp_path):
    config, folder = tiny(tmp_path), tmp_path / "run"
    result = train_run(config, folder, resume=False, reporter=SilentReporter())
    again = load_run(folder, SilentReporter()).evaluate("test", draws=3)
    assert again.as_dict() == result["test"]
    with pytest.raises(TrainingError, match=r"is not a run: it has no config\.json"):
        load_run(tmp_path, SilentReporter())


def test_a_configuration_that_does_not_fit_the_weights_is_named(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    train_run(config, folder, resume=False, reporter=SilentReporter())
    wider = config.model_copy(update={"model": config.model.model_copy(update={"ffn_dim": 11})})
    (folder / "config.json").write_text(wider.to_json())
    with pytest.raises(
        TrainingError,
        match=r"run: the checkpoint does not fit config\.json: \S+ is \(8, 8\) in the checkpoint, \(11, 8\) in the mod",
    ):
        load_run(folder, SilentReporter())


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


def test_a_target_stops_early(tmp_path):
    result = train_run(tiny(tmp_path, target_accuracy=0.01), tmp_path / "run", resume=False, reporter=SilentReporter())
    assert result["steps"] == 4


def test_epochs_count(tmp_path):
    config = tiny(tmp_path, max_steps=None, max_epochs=2, batch_size=100)
    # 360 examples in batches of 100: the last has 60.
    assert train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())["steps"] == 8


def test_a_folder_is_not_overwritten(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    train_run(config, folder, resume=False, reporter=SilentReporter())
    with pytest.raises(TrainingError, match="holds a run already; --resume goes on with it"):
        train_run(config, folder, resume=False, reporter=SilentReporter())
    other = tiny(tmp_path, max_steps=2, batch_size=8)
    with pytest.raises(TrainingError, match=r"another configuration: training\.batch_size was 16, is 8"):
        train_run(other, folder, resume=True, reporter=SilentReporter())


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_does_not_become_shorter_than_it_is(tmp_path):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path), folder, resume=False, reporter=SilentReporter())
    before = contents(folder)
    with pytest.raises(TrainingError, match="run has done 10 steps, which can't become 5; ask for as many or more"):
        train_run(tiny(tmp_path, max_steps=5), folder, resume=True, reporter=SilentReporter())
    assert contents(folder) == before


@pytest.mark.parametrize(("schedule", "notes"), [("constant", 0), ("cosine", 1)])
def test_a_longer_run_says_that_its_schedule_changes(tmp_path, schedule, notes):
    train_run(tiny(tmp_path, schedule=schedule, max_steps=5), tmp_path / "run", resume=False, reporter=SilentReporter())
    listener = Listener()
    train_run(tiny(tmp_path, schedule=schedule), tmp_path / "run", resume=True, reporter=listener)
    said = [message for message in listener.said if "training.max_steps was 5, is 10. The cosine schedule" in message]
    assert len(said) == notes
    again = Listener()
    train_run(tiny(tmp_path, schedule=schedule), tmp_path / "run", resume=True, reporter=again)
    assert not any("cosine" in message for message in again.said)


def test_what_fails_before_the_first_step_leaves_no_run(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    impossible = config.model_copy(update={"data": config.data.model_copy(update={"test_limit": 46})})
    with pytest.raises(DataError, match="test_limit is 46, but there are 45 examples"):
        train_run(impossible, folder, resume=False, reporter=SilentReporter())
    odd = tiny(tmp_path, "gmm-rks:num_frequencies=7", max_steps=2)
    with pytest.raises(ValueError, match="multiple of num_components=2, got 7"):
        train_run(odd, folder, resume=False, reporter=SilentReporter())
    assert contents(folder) == {}
    assert train_run(config, folder, resume=False, reporter=SilentReporter())["steps"] == 2


def test_data_may_move_but_not_change(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    train_run(config, folder, resume=False, reporter=SilentReporter())
    (tmp_path / "data").rename(tmp_path / "moved")
    longer = tiny(tmp_path, max_steps=3)
    moved = longer.model_copy(update={"data": longer.data.model_copy(update={"root": tmp_path / "moved"})})
    assert train_run(moved, folder, resume=True, reporter=SilentReporter())["steps"] == 3
    fingerprints = json.loads((folder / "data.json").read_text())
    assert fingerprints["train"]["examples"] == 360
    fingerprints["train"] |= {"examples": 359, "sha256": "0" * 64}
    (folder / "data.json").write_text(json.dumps(fingerprints))
    before = contents(folder)
    with pytest.raises(
        TrainingError, match=r"other data: train was 359 examples \(sha256 0{12}\), is 360 examples \(sha256 \w{12}\)$"
    ):
        train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())
    assert contents(folder) == before
    for damage in ("", "[]", '{"train": 3}'):
        (folder / "data.json").write_text(damage)
        with pytest.raises(TrainingError, match=r"data\.json is damaged; remove it to go on"):
            train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())
    (folder / "data.json").unlink()
    assert train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())["steps"] == 10


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"can't write to .*file/run"):
        train_run(tiny(tmp_path), tmp_path / "file" / "run", resume=False, reporter=SilentReporter())


def test_a_torn_checkpoint_is_passed_over_and_the_run_ends_the_same(tmp_path):
    config = tiny(tmp_path)
    train_run(config, tmp_path / "straight", resume=False, reporter=SilentReporter())
    train_run(tiny(tmp_path, max_steps=8), tmp_path / "torn", resume=False, reporter=SilentReporter())
    weights = tmp_path / "torn" / "checkpoints" / "step-00000008" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    listener = Listener()
    train_run(config, tmp_path / "torn", resume=True, reporter=listener)
    assert any("step-00000008 is not whole" in message for message in listener.said)
    assert any("going on after step 6" in message for message in listener.said)
    assert_same_state(final_state(tmp_path / "straight"), final_state(tmp_path / "torn"))


def test_a_loss_that_is_not_finite_stops_the_run_by_name(tmp_path, monkeypatch):
    scores, calls = trainer_module.class_scores, []

    def poisoned(model, batch):
        calls.append(batch)
        return scores(model, batch) * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr(trainer_module, "class_scores", poisoned)
    with pytest.raises(
        TrainingError, match=r"the loss is nan at step 5; the last good checkpoint is .*step-00000003"
    ) as caught:
        train_run(tiny(tmp_path), tmp_path / "run", resume=False, reporter=SilentReporter())
    for index in calls[-1].ids.tolist():
        assert str(index) in str(caught.value)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_signal_saves_and_leaves(tmp_path, monkeypatch, schedule):
    config = tiny(tmp_path, schedule=schedule)
    train_run(config, tmp_path / "straight", resume=False, reporter=SilentReporter())
    scores, calls = trainer_module.class_scores, []

    def interrupting(model, batch):
        calls.append(batch)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return scores(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "class_scores", interrupting)
        with pytest.raises(Interrupted, match="SIGTERM: stopped after step 5, state saved in"):
            train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train_run(config, tmp_path / "run", resume=True, reporter=SilentReporter())
    assert_same_state(final_state(tmp_path / "straight"), final_state(tmp_path / "run"))


def test_names_of_runs(tmp_path):
    assert run_name(tiny(tmp_path, "gmm-rks")) == "sparsity0.5-laptop-gmm-rks-seed0"
    assert run_name(tiny(tmp_path)) == "sparsity0.5-laptop-gmm-rks-num_frequencies=8-seed0"
    assert run_name(tiny(tmp_path, "gmm-rks:frozen=true")) == "sparsity0.5-laptop-gmm-rks-frozen=true-seed0"


def train_command(tmp_path, name, *, processes=1):
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    return [
        *[sys.executable, *launcher, "-m", "klformer", "train", "--task", "sparsity"],
        *["--attention", "gmm-rks:num_frequencies=8", "--out", str(tmp_path), "--name", name],
        *[f"--data.root={tmp_path / 'data'}", *TINY_FLAGS],
    ]


@pytest.mark.slow
def test_killed_five_times_and_resumed_is_the_same_run(tmp_path):
    longer = ["--training.max-steps", "60", "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*train_command(tmp_path, "straight"), *longer], check=True, env=environment)
    chance, killed = random.Random(7), 0
    command = [*train_command(tmp_path, "killed"), *longer, "--resume"]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for at in sorted(chance.sample(range(2, 55), 5)):
        process = subprocess.Popen(command, env=environment)
        while process.poll() is None:
            if metrics.exists() and any(line["step"] >= at for line in read_lines(metrics)):
                process.send_signal(signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.005)
        process.wait()
    assert killed == 5
    subprocess.run(command, check=True, env=environment)
    assert_same_state(final_state(tmp_path / "straight"), final_state(tmp_path / "killed"))
    results = [json.loads((tmp_path / name / "result.json").read_text())["test"] for name in ("straight", "killed")]
    assert results[0] == results[1]
    logs = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("straight", "killed")]
    assert without_speed(logs[0]) == without_speed(logs[1])


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    plain = ["--model.dropout", "0", "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*train_command(tmp_path, "one"), *plain], check=True, env=environment)
    two = [*train_command(tmp_path, "two", processes=2), *plain]
    subprocess.run([*two, "--training.max-steps", "5"], check=True, env=environment)
    subprocess.run([*two, "--resume"], check=True, env=environment)
    logs = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    losses = [[r["loss"] for r in log if r["kind"] == "train"] for log in logs]
    assert len(losses[0]) == 10
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert results[1]["environment"]["processes"] == 2
    assert results[1]["test"]["num_examples"] == results[0]["test"]["num_examples"]
    states = [final_state(tmp_path / name) for name in ("one", "two")]
    noise = [state["encoder.layers.0.self_attention.mechanism.kernel.spectrum.noise"] for state in states]
    assert torch.equal(*noise), "the frequencies must be drawn alike"


@pytest.mark.parametrize("task", ["listops", "text", "retrieval", "image", "sparsity"])
@pytest.mark.parametrize("name", klformer.attention_names())
def test_the_papers_models_take_a_step(task, name):
    """Every model of the `paper` preset at its full size, two short examples, forward, backward and a step."""
    config = preset("paper", task, AttentionConfig(name=name))
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


def test_a_full_disk_is_named(tmp_path):
    config, folder = tiny(tmp_path), tmp_path / "small" / "run"
    folder.parent.mkdir()
    train_run(config, tmp_path / "large", resume=False, reporter=SilentReporter())
    with (
        small_disk(folder.parent, 4096),
        pytest.raises(TrainingError, match=r"can't write .*/run/initial\.safetensors: the disk is full"),
    ):
        train_run(config, folder, resume=False, reporter=SilentReporter())


@pytest.mark.parametrize("file", ["config.json", "initial.safetensors", "metrics.jsonl", "result.json"])
def test_a_file_of_a_run_that_can_not_be_written_is_named(tmp_path, file):
    folder = tmp_path / "run"
    (folder / f".{file}.tmp").mkdir(parents=True)
    with pytest.raises(TrainingError, match=f"can't write {folder}/{file}: .*"):
        train_run(tiny(tmp_path, max_steps=1), folder, resume=False, reporter=SilentReporter())


def damage(checkpoint):
    weights = checkpoint / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def calling_at(number, action, function):
    """`function`, with `action` done just before its call of that number."""
    calls = []

    def wrapper(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            action()
        return function(*args, **kwargs)

    return wrapper


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_torn_checkpoints_do_not_push_out_whole_ones(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path, keep_checkpoints=3), folder, resume=False, reporter=SilentReporter())
    for step in (9, 10):
        damage(folder / "checkpoints" / f"step-{step:08d}")
    listener = Listener()
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "class_scores", calling_at(1, terminate, trainer_module.class_scores))
        with pytest.raises(Interrupted, match="stopped after step 7, state saved"):
            train_run(tiny(tmp_path), folder, resume=True, reporter=listener)
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-00000006", "step-00000007"}
    assert f"removed {folder}/checkpoints/step-00000010" in listener.said
    train_run(tiny(tmp_path), folder, resume=True, reporter=listener)
    assert "going on after step 7" in listener.said


def test_a_damaged_best_model_is_not_the_end(tmp_path):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path), folder, resume=False, reporter=SilentReporter())
    for checkpoint in (folder / "checkpoints").glob("best-*"):
        damage(checkpoint)
    listener = Listener()
    assert train_run(tiny(tmp_path), folder, resume=True, reporter=listener)["best_step"] == 10
    said = [message for message in listener.said if "no whole checkpoint of the best model" in message]
    assert len(said) == 1
    assert "step-00000010" in said[0]


def test_a_run_that_reached_its_target_stays_where_it_is(tmp_path):
    config, folder = tiny(tmp_path, target_accuracy=0.01), tmp_path / "run"
    first = train_run(config, folder, resume=False, reporter=SilentReporter())
    (folder / "result.json").unlink()
    again = train_run(config, folder, resume=True, reporter=SilentReporter())
    assert again["steps"] == first["steps"] == 4
    assert again["test"] == first["test"]
    assert train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())["steps"] == 10


def poison_gradients(monkeypatch, at):
    """From scores that are finite come gradients that are not, in one call."""
    scores, calls = trainer_module.class_scores, []

    def poisoned(model, batch):
        calls.append(batch)
        nothing = (0 * next(model.parameters())).sum().abs().sqrt() if len(calls) == at else 0.0
        return scores(model, batch) + nothing

    monkeypatch.setattr(trainer_module, "class_scores", poisoned)
    return calls


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(tmp_path, monkeypatch, clip_norm):
    calls = poison_gradients(monkeypatch, at=3)
    message = "the norm of the gradient is nan at step 3; the last good checkpoint is .*step-00000002"
    config = tiny(tmp_path, clip_norm=clip_norm, checkpoint_every=1)
    with pytest.raises(TrainingError, match=message) as caught:
        train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())
    assert all(str(index) in str(caught.value) for index in calls[-1].ids.tolist())
    assert all(tensor.isfinite().all() for tensor in final_state(tmp_path / "run").values())


def accelerator_with_scaler(config):
    accelerator = make_accelerator(config)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    return accelerator


def test_the_scale_of_gradients_is_kept_and_its_skipped_steps_are_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "make_accelerator", accelerator_with_scaler)
    folder = tmp_path / "run"
    train_run(tiny(tmp_path, max_steps=5), folder, resume=False, reporter=SilentReporter())
    poison_gradients(monkeypatch, at=2)
    train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())
    # Doubled after steps 2, 4, 6 would have been; 6 is made, 7 is skipped and halves it; then after 9.
    scaler = CheckpointStore(folder / "checkpoints", print).newest("step").info["scaler"]
    assert scaler["scale"] == 4 * 2 * 2 * 2 / 2 * 2
    assert scaler["_growth_tracker"] == 1


def test_interrupting_the_final_evaluation_says_that_training_is_complete(tmp_path, monkeypatch):
    config, folder = tiny(tmp_path), tmp_path / "run"
    evaluate = trainer_module.Trainer.evaluate

    def interrupted(self, examples, *, draws=None):
        if draws is not None:
            signal.raise_signal(signal.SIGINT)
        return evaluate(self, examples, draws=draws)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "evaluate", interrupted)
        with pytest.raises(Interrupted, match=r"training is complete \(10 steps\), .*; --resume evaluates"):
            train_run(config, folder, resume=False, reporter=SilentReporter())
    assert train_run(config, folder, resume=True, reporter=SilentReporter())["steps"] == 10


def test_a_signal_while_the_last_checkpoint_is_written_is_not_lost(tmp_path, monkeypatch):
    save = trainer_module.Trainer._save
    monkeypatch.setattr(trainer_module.Trainer, "_save", calling_at(1, terminate, save))
    with pytest.raises(Interrupted, match=r"training is complete \(2 steps\)"):
        train_run(tiny(tmp_path, max_steps=2), tmp_path / "run", resume=False, reporter=SilentReporter())


SIGNAL_AFTER_VALIDATION = """
import os, signal, sys
from klformer.cli import main
from klformer.training.trainer import Trainer

validate = Trainer._validate

def signalled(self, log):
    validate(self, log)
    if self.accelerator.is_main_process:
        signal.raise_signal(signal.SIGTERM)

Trainer._validate = signalled
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both(tmp_path):
    script = tmp_path / "signalled.py"
    script.write_text(SIGNAL_AFTER_VALIDATION)
    command = train_command(tmp_path, "run", processes=2)
    at = command.index("klformer")
    command[at - 1 : at + 1] = [str(script)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert "stopped after step 4, state saved" in done.stderr
    assert CheckpointStore(tmp_path / "run" / "checkpoints", print).newest("step").step == 4


@pytest.mark.slow
def test_two_processes_are_one_with_a_last_batch_of_one(tmp_path):
    # 360 examples: batches of 359 and of 1.
    plain = ["--model.dropout", "0", "--quiet", "--training.batch-size", "359", "--training.max-steps", "6"]
    for name, processes in [("one", 1), ("two", 2)]:
        command = [*train_command(tmp_path, name, processes=processes), *plain]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    logs = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    losses = [[r["loss"] for r in log if r["kind"] == "train"] for log in logs]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
