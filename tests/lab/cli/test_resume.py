"""Going on with a run by its name, and which of its weights an evaluation speaks of."""

import json
import os
import stat

import pytest
from cli_support import fails, run
from run_support import damage, sealed
from support import TINY, TINY_MODEL


@pytest.fixture
def folder(home, capsys):
    run(capsys, "train", "--name", "x", "--attention", "gmm-prf:num_frequencies=8", "--seed", "3", *TINY)
    return home / "runs" / "x"


def test_a_name_is_enough(folder, capsys):
    before = json.loads((folder / "config.json").read_text())
    out = run(capsys, "train", "--name", "x", "--resume", "--training.max-steps", "8")
    assert "going on after step 6" in out
    before["training"]["max_steps"] = 8
    assert json.loads((folder / "config.json").read_text()) == before


def test_what_changes_no_result_may_change(folder, capsys):
    run(
        capsys,
        *["train", "--name", "x", "--resume", "--training.max-steps", "8", "--training.checkpoint-every", "1"],
        *["--training.log-every", "7", "--training.checkpoint-seconds", "None"],
    )
    error = fails(capsys, 1, "train", "--name", "x", "--resume", "--training.batch-size", "8")
    assert "was started with another configuration: training.batch_size was 16, is 8" in error
    error = fails(capsys, 1, "train", "--name", "x", "--resume", "--attention", "softmax")
    assert "attention.name was 'gmm-prf', is 'softmax'" in error


def test_a_run_that_is_not_there_does_not_go_on(folder, capsys):
    error = fails(capsys, 1, "train", "--name", "y", "--resume")
    assert "there is no run runs/y to go on with; without --resume it is started. Runs in runs: x" in error
    assert not folder.with_name("y").exists()


def test_what_fails_leaves_no_folder(home, capsys):
    error = fails(capsys, 1, "train", "--name", "z", "--task", "csv", *TINY_MODEL, "--data.train", str(home / "no.csv"))
    assert "no.csv" in error
    assert not (home / "runs" / "z").exists()


def test_an_evaluation_says_which_weights_it_has(folder, capsys):
    assert "best checkpoint, step" in run(capsys, "eval", folder)
    best = sorted((folder / "checkpoints").glob("best-*"))
    assert len(best) == 2
    damage(best[1])
    assert ", an earlier best checkpoint, step" in run(capsys, "eval", folder)
    damage(best[0])
    assert ", newest checkpoint, not the best one, step 6" in run(capsys, "eval", folder)


@pytest.mark.parametrize("lacks", ["info", "files", "step"])
def test_a_manifest_that_lacks_something_is_named(folder, capsys, lacks):
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        content = json.loads(manifest.read_text())
        del content[lacks]
        manifest.write_text(sealed(content))
    error = fails(capsys, 1, "eval", folder)
    assert error == f"klformer: {folder} has no whole checkpoint\n"


def test_colleagues_may_read_what_the_umask_says(home, capsys):
    before = os.umask(0o027)
    try:
        run(capsys, "train", "--name", "x", "--attention", "softmax", *TINY)
    finally:
        os.umask(before)
    files = [path for path in (home / "runs" / "x").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
