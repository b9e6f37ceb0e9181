"""Runs that stop: at a target, by signals, by numbers that are not finite, by disks."""

import errno
import json
import os
import re
import signal
from functools import partial

import pytest
from disk_support import small_disk
from run_support import (
    Listener,
    acting_at,
    assert_same_state,
    calling_at,
    final_state,
    poison_gradients,
    sealed,
    terminate,
    tiny,
    while_training,
    without_speed,
)

from klformer.errors import DataError, FileError, Interrupted, RunError
from klformer.lab.runs.load import load_run
from klformer.lab.runs.train import train_run
from klformer.lab.training import step as step_module
from klformer.lab.training import trainer as trainer_module
from klformer.lab.training.checkpoint import CheckpointStore
from klformer.lab.training.log import read_lines
from klformer.lab.training.objectives import Classification
from klformer.lab.training.progress import SilentReporter


def test_a_target_stops_early(tmp_path):
    result = train_run(tiny(tmp_path, target=0.01), tmp_path / "run", resume=False, reporter=SilentReporter())
    assert result["steps"] == 4


def test_what_fails_before_the_first_step_leaves_no_run(tmp_path):
    config, folder = tiny(tmp_path, max_steps=2), tmp_path / "run"
    (tmp_path / "file").write_text("")
    impossible = config.model_copy(update={"data": config.data.model_copy(update={"root": tmp_path / "file"})})
    with pytest.raises(DataError, match="file"):
        train_run(impossible, folder, resume=False, reporter=SilentReporter())
    odd = tiny(tmp_path, "gmm-rks:num_frequencies=7", max_steps=2)
    with pytest.raises(ValueError, match="multiple of num_components=2, got 7"):
        train_run(odd, folder, resume=False, reporter=SilentReporter())
    assert not folder.exists()
    assert train_run(config, folder, resume=False, reporter=SilentReporter())["steps"] == 2


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't write to .*file/run"):
        train_run(tiny(tmp_path), tmp_path / "file" / "run", resume=False, reporter=SilentReporter())


def test_a_full_disk_is_named(tmp_path):
    config, folder = tiny(tmp_path), tmp_path / "small" / "run"
    folder.parent.mkdir()
    train_run(config, tmp_path / "large", resume=False, reporter=SilentReporter())
    with (
        small_disk(folder.parent, 4096),
        pytest.raises(FileError, match=r"can't write .*/run/initial\.safetensors: the disk is full"),
    ):
        train_run(config, folder, resume=False, reporter=SilentReporter())
    assert not folder.exists()


@pytest.mark.parametrize("file", ["config.json", "initial.safetensors", "metrics.jsonl", "result.json"])
def test_a_file_of_a_run_that_can_not_be_written_is_named(tmp_path, file, monkeypatch):
    folder, replace = tmp_path / "run", os.replace

    def refuse(source, target):
        if target == folder / file:
            raise PermissionError(errno.EACCES, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(FileError, match=f"can't write {folder}/{file}: .*"):
        train_run(tiny(tmp_path, max_steps=1), folder, resume=False, reporter=SilentReporter())


def test_a_loss_that_is_not_finite_stops_the_run_by_name(tmp_path, monkeypatch):
    calls = []

    def poisoned(outputs, model, batch):
        calls.append(batch)
        return outputs(model, batch) * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr(Classification, "outputs", while_training(poisoned))
    with pytest.raises(
        RunError, match=r"the loss is nan at step 5; the last good checkpoint is .*step-00000003"
    ) as caught:
        train_run(tiny(tmp_path), tmp_path / "run", resume=False, reporter=SilentReporter())
    for index in calls[-1].ids.tolist():
        assert str(index) in str(caught.value)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(tmp_path, monkeypatch, clip_norm):
    calls = poison_gradients(monkeypatch, at=3)
    message = "the norm of the gradient is nan at step 3; the last good checkpoint is .*step-00000002"
    config = tiny(tmp_path, clip_norm=clip_norm, checkpoint_every=1)
    with pytest.raises(RunError, match=message) as caught:
        train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())
    assert all(str(index) in str(caught.value) for index in calls[-1].ids.tolist())
    assert all(tensor.isfinite().all() for tensor in final_state(tmp_path / "run").values())


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_signal_saves_and_leaves(tmp_path, monkeypatch, schedule):
    config = tiny(tmp_path, schedule=schedule, log_every=4)
    train_run(config, tmp_path / "straight", resume=False, reporter=SilentReporter())
    with monkeypatch.context() as patch:
        patch.setattr(Classification, "outputs", acting_at(5, terminate))
        with pytest.raises(Interrupted, match="SIGTERM: stopped after step 5, state saved in"):
            train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train_run(config, tmp_path / "run", resume=True, reporter=SilentReporter())
    assert_same_state(final_state(tmp_path / "straight"), final_state(tmp_path / "run"))
    logs = [without_speed(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("straight", "run")]
    assert logs[0] == logs[1]


def test_a_terminal_that_is_gone_is_a_signal_like_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(Classification, "outputs", acting_at(5, partial(signal.raise_signal, signal.SIGHUP)))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may have been started by nohup
    try:
        with pytest.raises(Interrupted, match="SIGHUP: stopped after step 5, state saved in"):
            train_run(tiny(tmp_path), tmp_path / "run", resume=False, reporter=SilentReporter())
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert CheckpointStore(tmp_path / "run" / "checkpoints", print).newest("step").step == 5


def test_what_nohup_ignores_stays_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(Classification, "outputs", acting_at(1, partial(signal.raise_signal, signal.SIGHUP)))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = train_run(tiny(tmp_path, max_steps=2), tmp_path / "run", resume=False, reporter=SilentReporter())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result["steps"] == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
def test_output_that_nobody_reads_any_more_loses_no_step(tmp_path, number):
    class Gone(SilentReporter):
        def step(self, step, **figures):
            if step == 5:
                raise OSError(number, "nobody there")

    with pytest.raises(Interrupted, match="stopped after step"):
        train_run(tiny(tmp_path), tmp_path / "run", resume=False, reporter=Gone())
    assert CheckpointStore(tmp_path / "run" / "checkpoints", print).newest("step").step in (5, 6)


def die():
    raise MemoryError("as if killed")


def test_checkpoints_are_written_by_time_too(tmp_path, monkeypatch):
    config = tiny(tmp_path, checkpoint_every=1000, checkpoint_seconds=1e-6)
    train_run(config, tmp_path / "straight", resume=False, reporter=SilentReporter())
    monkeypatch.setattr(step_module, "REST", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Classification, "outputs", acting_at(8, die))
        with pytest.raises(MemoryError):
            train_run(config, tmp_path / "run", resume=False, reporter=SilentReporter())
    listener = Listener()
    # How often a run saves may change in the middle: it changes no result.
    seldom = tiny(tmp_path, checkpoint_every=9, checkpoint_seconds=None)
    train_run(seldom, tmp_path / "run", resume=True, reporter=listener)
    assert "going on after step 7" in listener.said
    assert_same_state(final_state(tmp_path / "straight"), final_state(tmp_path / "run"))


def test_time_between_checkpoints_grows_with_what_they_cost(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_module.time, "monotonic", lambda: now[0])
    checkpoints = step_module.CheckpointClock(30)
    due = []
    for second in range(200):
        now[0] = float(second)
        if checkpoints.is_due():
            due.append(second)
            with checkpoints.saving():
                now[0] += 3
    assert due == [30, 93, 156]
    assert not step_module.CheckpointClock(None).is_due()


def test_the_only_weights_are_never_removed(tmp_path, monkeypatch):
    """A full disk may leave a best model without a checkpoint to go on from."""
    config = tiny(tmp_path, checkpoint_every=1000, checkpoint_seconds=None)
    folder, best = tmp_path / "run", tmp_path / "run" / "checkpoints" / "best-00000004"
    for dies_at in (5, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Classification, "outputs", acting_at(dies_at, die))
            listener = Listener()
            with pytest.raises(MemoryError):
                train_run(config, folder, resume=True, reporter=listener)
        assert load_run(folder, SilentReporter()).step == 4
    assert f"there is no checkpoint to go on from; {best} is kept until the run is as far again" in listener.said
    # Weights that the run does not come to again, as on another machine, are not among its own in the end.
    best.rename(best.with_name("best-00000006"))
    manifest = best.with_name("best-00000006") / "manifest.json"
    manifest.write_text(sealed(json.loads(manifest.read_text()) | {"step": 6}))
    train_run(config, folder, resume=True, reporter=listener)
    assert f"removed {best.with_name('best-00000006')}, the run has come to step 10 again" in listener.said


def test_a_run_says_what_it_is_about_to_do_and_how_long_it_takes(tmp_path, monkeypatch):
    listener = Listener()
    slow = iter(range(0, 10**6, 30))
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: float(next(slow)))
    config = tiny(tmp_path, max_steps=14, checkpoint_seconds=None)
    train_run(config, tmp_path / "run", resume=False, reporter=listener)
    assert "14 steps of 16 examples, evaluated every 4 steps; Ctrl-C saves and stops, --resume goes on" in listener.said
    assert any(re.match(r"about \d+ min for 4 steps of \d+ s, and the evaluations", said) for said in listener.said)
    assert not any("meant for a GPU" in said for said in listener.said)
    paper = tiny(tmp_path, max_steps=1).model_copy(update={"preset": "paper"})
    train_run(paper, tmp_path / "paper", resume=False, reporter=listener)
    assert any("the preset paper is meant for a GPU, and this is a CPU: 1 steps" in said for said in listener.said)


@pytest.fixture
def _ctrl_c():
    """Ctrl-C as on a terminal; a shell makes what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
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
    save = trainer_module.Saver.save
    monkeypatch.setattr(trainer_module.Saver, "save", calling_at(1, terminate, save))
    with pytest.raises(Interrupted, match=r"training is complete \(2 steps\)"):
        train_run(tiny(tmp_path, max_steps=2), tmp_path / "run", resume=False, reporter=SilentReporter())


def test_a_second_signal_stops_at_once(tmp_path, monkeypatch):
    def twice():
        terminate()
        terminate()

    with monkeypatch.context() as patch:
        patch.setattr(Classification, "outputs", acting_at(5, twice))
        with pytest.raises(Interrupted, match="stopped at once, in the middle of a step"):
            train_run(tiny(tmp_path), tmp_path / "run", resume=False, reporter=SilentReporter())
    train_run(tiny(tmp_path), tmp_path / "straight", resume=False, reporter=SilentReporter())
    train_run(tiny(tmp_path), tmp_path / "run", resume=True, reporter=SilentReporter())
    assert_same_state(final_state(tmp_path / "straight"), final_state(tmp_path / "run"))
