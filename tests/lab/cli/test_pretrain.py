"""Pretraining from the command line: it goes on bit for bit, and its weights are where a task starts from."""

import json

import pytest
import torch
from cli_support import fails, run
from run_support import assert_same_state, calling_at, final_state, terminate
from safetensors.torch import load_file

from klformer.lab.training.objectives import MaskedLanguageModelling

TEXT = "the kernel of attention is learned from data\nand a text is a sequence of bytes\n" * 40
SIZES = [
    *["--model.num-layers=1", "--model.num-heads=2", "--model.model-dim=8", "--model.head-dim=4", "--model.ffn-dim=8"],
]
SHORT = [
    *["--training.max-steps=8", "--training.evaluate-every=4", "--training.checkpoint-every=2"],
    *["--training.evaluation-draws=2", "--schedule.warmup-steps=2", "--training.batch-size=8"],
]
ATTENTION = "--attention=fastfood-prf:num_frequencies=8"


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text(TEXT)
    rows = "".join(f"{line},{number % 2}\n" for number, line in enumerate(TEXT.splitlines()))
    (tmp_path / "rows.csv").write_text("text,label\n" + rows)
    return tmp_path


def pretrain(texts, name, *more):
    options = [f"--data.train={texts / 'book.txt'}", "--data.max-len=24", "--data.tokens.kind=characters", ATTENTION]
    return ["pretrain", *options, f"--out={texts}", f"--name={name}", *SIZES, *SHORT, *more]


def test_a_task_starts_from_a_pretrained_run(texts, capsys):
    out = run(capsys, *pretrain(texts, "pre"))
    assert "by the frequency of tokens alone: masked accuracy" in out
    result = json.loads((texts / "pre" / "result.json").read_text())
    assert result["metric"] == "masked_accuracy"
    assert result["test"]["perplexity"] > 1
    assert 0 < result["unigram"]["masked_accuracy"] < 1
    assert json.loads((texts / "pre" / "task.json").read_text())["chance"] == result["unigram"]["masked_accuracy"]
    fine = ["train", "--task=csv", f"--data.train={texts / 'rows.csv'}", f"--out={texts}", *SHORT, "--name=fine"]
    out = run(capsys, *fine, f"--init-from={texts / 'pre'}")
    assert "embedding and encoder" in out
    assert "fresh: head" in out
    newest = max((texts / "pre" / "checkpoints").glob("best-*"))
    theirs = load_file(newest / "weights.safetensors")
    ours = load_file(texts / "fine" / "initial.safetensors")
    shared = [name for name in ours if name.startswith(("embedding.", "encoder."))]
    assert shared
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    knowledge = [json.loads((texts / name / "knowledge.json").read_text())["inputs"] for name in ("pre", "fine")]
    assert knowledge[0] == knowledge[1], "texts are read with the tokens of the pretrained run"
    error = fails(capsys, 1, *fine[:-1], "--name=wide", f"--init-from={texts / 'pre'}", "--model.ffn-dim=16")
    assert "model.ffn_dim is 16, in the run 8 (--model.ffn-dim)" in error
    error = fails(capsys, 1, *fine[:-1], "--name=soft", f"--init-from={texts / 'pre'}", "--attention=softmax")
    assert "attention is softmax, in the run fastfood-prf" in error


def test_learned_positions_end_where_pretraining_did(texts, capsys):
    run(capsys, *pretrain(texts, "pre"), "--model.positions=learned")
    fine = ["train", "--task=csv", f"--data.train={texts / 'rows.csv'}", f"--out={texts}", *SHORT, "--name=long"]
    error = fails(capsys, 1, *fine, f"--init-from={texts / 'pre'}", "--data.max-len=30")
    assert "sequences must not be longer than the run's (--data.max-len)" in error


def test_an_interrupted_pretraining_goes_on_bit_for_bit(texts, capsys, monkeypatch):
    run(capsys, *pretrain(texts, "whole"))
    pose = MaskedLanguageModelling.pose
    with monkeypatch.context() as patched:
        patched.setattr(MaskedLanguageModelling, "pose", calling_at(5, terminate, pose))
        fails(capsys, 130, *pretrain(texts, "cut"))
    run(capsys, *pretrain(texts, "cut", "--resume"))
    assert_same_state(final_state(texts / "whole"), final_state(texts / "cut"))


def test_self_pretraining_on_the_sequences_of_a_task(texts, capsys):
    task = ["--task=csv", f"--data.train={texts / 'rows.csv'}", "--data.max-len=24", ATTENTION, f"--out={texts}"]
    run(capsys, "pretrain", *task, *SIZES, *SHORT, "--name=self")
    out = run(capsys, "train", *task, *SHORT, "--name=fine", f"--init-from={texts / 'self'}")
    assert "embedding and encoder" in out
    small = ["--data.num-examples=450", "--data.max-len=9", "--data.validation-limit=45", "--data.test-limit=45"]
    error = fails(capsys, 2, "pretrain", "--task=sparsity", *small, *SIZES, *SHORT, f"--out={texts}")
    assert "sparsity has vectors, not tokens" in error
    assert "a corpus has no labels" in fails(
        capsys, 2, "train", "--task=corpus", f"--data.train={texts / 'book.txt'}", f"--out={texts}"
    )


def test_the_mask_is_one_more_token_where_a_task_has_none(texts, capsys):
    rows = "".join(f"{n % 7} {n % 5} 3 {n % 3},{n % 2}\n" for n in range(80))
    (texts / "signal.csv").write_text("text,label\n" + rows)
    task = ["--task=csv", f"--data.train={texts / 'signal.csv'}", "--data.inputs=integers", ATTENTION]
    run(capsys, "pretrain", *task, f"--out={texts}", *SIZES, *SHORT, "--name=self")
    out = run(capsys, "train", *task, f"--out={texts}", *SHORT, "--name=fine", f"--init-from={texts / 'self'}")
    assert "8 of 9 rows of embedding.inputs.weight" in out
