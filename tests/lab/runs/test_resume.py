"""Runs that go on: from whole and torn checkpoints, killed, longer, with other data."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch
from run_support import (
    Listener,
    acting_at,
    assert_same_state,
    contents,
    damage,
    final_state,
    poison_gradients,
    terminate,
    tiny,
    train_command,
    without_speed,
)

import klformer
from klformer.errors import Interrupted, RunError
from klformer.lab.runs import train as run_module
from klformer.lab.runs.folder import RunFolder, what_it_took
from klformer.lab.runs.load import load_run
from klformer.lab.runs.train import train_run
from klformer.lab.training.checkpoint import CheckpointStore
from klformer.lab.training.log import read_lines
from klformer.lab.training.objectives import Classification
from klformer.lab.training.processes import make_accelerator
from klformer.lab.training.progress import SilentReporter
from klformer.lab.training.saving import Saver


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


def test_a_folder_is_not_overwritten(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    train_run(config, folder, resume=False, reporter=SilentReporter())
    with pytest.raises(RunError, match="holds a run already; --resume goes on with it"):
        train_run(config, folder, resume=False, reporter=SilentReporter())
    other = tiny(tmp_path, max_steps=2, batch_size=8)
    with pytest.raises(RunError, match=r"another configuration: training\.batch_size was 16, is 8"):
        train_run(other, folder, resume=True, reporter=SilentReporter())


def test_a_run_does_not_become_shorter_than_it_is(tmp_path):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path), folder, resume=False, reporter=SilentReporter())
    before = contents(folder)
    with pytest.raises(RunError, match="run has done 10 steps, which can't become 5; ask for as many or more"):
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
        RunError, match=r"other data: train was 359 examples \(sha256 0{12}\), is 360 examples \(sha256 \w{12}\)$"
    ):
        train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())
    assert contents(folder) == before
    for damaged in ("", "[]", '{"train": 3}'):
        (folder / "data.json").write_text(damaged)
        with pytest.raises(RunError, match=r"data\.json is damaged; remove it to go on"):
            train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())
    (folder / "data.json").unlink()
    assert train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())["steps"] == 10


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


def test_torn_checkpoints_do_not_push_out_whole_ones(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path, keep_checkpoints=3), folder, resume=False, reporter=SilentReporter())
    for step in (9, 10):
        damage(folder / "checkpoints" / f"step-{step:08d}")
    listener = Listener()
    with monkeypatch.context() as patch:
        patch.setattr(Classification, "outputs", acting_at(1, terminate))
        with pytest.raises(Interrupted, match="stopped after step 7, state saved"):
            train_run(tiny(tmp_path), folder, resume=True, reporter=listener)
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-00000006", "step-00000007"}
    assert f"removed {folder}/checkpoints/step-00000010, the run goes on from step 6" in listener.said
    train_run(tiny(tmp_path), folder, resume=True, reporter=listener)
    assert "going on after step 7" in listener.said


def test_the_best_model_is_one_of_the_run_that_went_on(tmp_path):
    folder, listener = tmp_path / "run", Listener()
    train_run(tiny(tmp_path, max_steps=8, evaluate_every=5), folder, resume=False, reporter=SilentReporter())
    checkpoints = folder / "checkpoints"
    # As if the run had been killed between an evaluation and the checkpoint after it.
    shutil.rmtree(checkpoints / "step-00000008")
    if not (checkpoints / "best-00000008").exists():
        shutil.copytree(next(checkpoints.glob("best-*")), checkpoints / "best-00000008")
    result = train_run(tiny(tmp_path, evaluate_every=5), folder, resume=True, reporter=listener)
    assert f"removed {checkpoints}/best-00000008, the run goes on from step 6" in listener.said
    best = CheckpointStore(checkpoints, print).newest("step").info["progress"]["best_step"]
    assert result["best_step"] == best != 8


def test_a_whole_best_model_is_not_removed_for_damaged_checkpoints(tmp_path):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path, max_steps=5), folder, resume=False, reporter=SilentReporter())
    best = load_run(folder, SilentReporter()).step
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        damage(checkpoint)
    with pytest.raises(RunError, match=rf"no checkpoint in .* is whole.* best model, of step {best}, is: `klform"):
        train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())
    assert load_run(folder, SilentReporter()).step == best


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
    config, folder = tiny(tmp_path, target=0.01), tmp_path / "run"
    first = train_run(config, folder, resume=False, reporter=SilentReporter())
    (folder / "result.json").unlink()
    again = train_run(config, folder, resume=True, reporter=SilentReporter())
    assert again["steps"] == first["steps"] == 4
    assert again["test"] == first["test"]
    assert train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())["steps"] == 10


def test_a_target_that_a_run_is_above_already_is_refused(tmp_path):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path), folder, resume=False, reporter=SilentReporter())
    before = contents(folder)
    with pytest.raises(
        RunError,
        match=r"validation accuracy of 0\.\d+ already, as good as the new training\.target of 0\.01; ask for more",
    ):
        train_run(tiny(tmp_path, target=0.01), folder, resume=True, reporter=SilentReporter())
    assert contents(folder) == before
    longer = tiny(tmp_path, max_steps=12, target=0.99)
    assert train_run(longer, folder, resume=True, reporter=SilentReporter())["steps"] == 12


def test_one_process_at_a_time(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    folder.mkdir()
    with (
        RunFolder(folder).only_process(),
        pytest.raises(RunError, match=r"another process is training in .*/run; wait"),
    ):
        train_run(config, folder, resume=True, reporter=SilentReporter())
    assert train_run(config, folder, resume=True, reporter=SilentReporter())["steps"] == 2


def test_a_damaged_record_is_named(tmp_path):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path, max_steps=5), folder, resume=False, reporter=SilentReporter())
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], lines[1][:9], *lines[2:]]) + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is damaged; remove the line"):
        train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())


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


@pytest.mark.slow
def test_killed_five_times_and_resumed_is_the_same_run(tmp_path):
    longer = ["--training.max-steps", "60", "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*train_command(tmp_path, "straight"), *longer], check=True, env=environment)
    chance, killed = random.Random(7), 0
    command = [*train_command(tmp_path, "killed"), *longer]
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
        command = [*train_command(tmp_path, "killed"), *longer, "--resume"]
    assert killed == 5
    subprocess.run(command, check=True, env=environment)
    assert_same_state(final_state(tmp_path / "straight"), final_state(tmp_path / "killed"))
    results = [json.loads((tmp_path / name / "result.json").read_text())["test"] for name in ("straight", "killed")]
    assert results[0] == results[1]
    logs = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("straight", "killed")]
    assert without_speed(logs[0]) == without_speed(logs[1])


def test_a_run_that_began_without_counting_processor_seconds_does_not_say_some(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    train_run(tiny(tmp_path, max_steps=5), folder, resume=False, reporter=SilentReporter())
    take_up = Saver._take_up

    def older(self, checkpoint):
        del checkpoint.info["progress"]["processor_seconds"]
        return take_up(self, checkpoint)

    monkeypatch.setattr(Saver, "_take_up", older)
    result = train_run(tiny(tmp_path), folder, resume=True, reporter=SilentReporter())
    assert (result["steps"], result["train_processor_seconds"]) == (10, None)
    assert what_it_took(result)["train_processor_seconds"] is None
