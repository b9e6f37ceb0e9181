"""The tasks of GLUE: its quirks are read as they are meant, and its metrics are those of the definitions."""

import csv
import json

import numpy as np
import pytest
import torch
from cli_support import fails, run
from glue_support import write_glue

from klformer.errors import DataError
from klformer.lab.report.paper_numbers import glue_row
from klformer.lab.runs.load import load_run
from klformer.lab.tasks import build_task
from klformer.lab.tasks.glue import GLUE_TASKS, GlueData
from klformer.lab.training.objectives import BinaryF1, Correlation, Matthews
from klformer.lab.training.progress import SilentReporter

TINY = [
    *["--model.num-layers=1", "--model.num-heads=2", "--model.model-dim=8", "--model.head-dim=4", "--model.ffn-dim=8"],
    *["--training.max-steps=4", "--training.evaluate-every=2", "--training.evaluation-draws=2"],
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("glue_data"))


def glue(name, root, **config):
    return build_task(name, GlueData(root=root, **{"tokens": {"kind": "bytes"}, **config}), quiet=True)


def texts(examples):
    return ["".join("|" if i == 257 else chr(i - 1) for i in ids) for ids in examples.first]


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_every_task_reads_its_files(tree, name):
    task = glue(name, tree)
    assert [len(task.load(split)) for split in ("train", "validation", "test")] == [36, 4, 20]
    assert "dev" in task.describe_protocol()
    assert ("|" in texts(task.load("test"))[0]) == (name not in ("sst2", "cola"))


def test_quirks(tree):
    assert texts(glue("sst2", tree).load("test"))[0] == 'an " odd quote 0 '
    assert texts(glue("mrpc", tree).load("test"))[0] == '" He said 0|she 0'
    assert texts(glue("cola", tree).load("test"))[:2] == ["words 0", "words 1"]
    assert glue("cola", tree).load("test").targets[:4].tolist() == [0, 1, 1, 0]
    qqp = glue("qqp", tree)
    qqp.load("train")
    assert "2 cut rows of train.tsv are left out" in qqp.notes()
    mnli = glue("mnli", tree)
    assert mnli.class_names() == ("contradiction", "entailment", "neutral")
    assert len(mnli.further_tests()["mismatched"]) == 20
    similarity = glue("stsb", tree)
    assert similarity.load("test").targets[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(similarity.objective(), Correlation)
    assert glue("rte", tree, protocol="lra").load("validation").fingerprint() == (
        glue("rte", tree).load("test").fingerprint()
    )


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(DataError, match=r"has no RTE/train\.tsv; --data\.root must be the folder of GLUE's tree"):
        glue("rte", tmp_path).load("train")
    write_glue(tmp_path)
    path = tmp_path / "RTE" / "train.tsv"
    path.write_text(path.read_text() + "41\tonly one\n")
    with pytest.raises(DataError, match=r"train\.tsv, line 42: has fewer fields between tabs than the header"):
        glue("rte", tmp_path).load("train")
    path.write_text("index\tsentence1\tlabel\n1\ta\tb\n")
    with pytest.raises(DataError, match="has no column 'sentence2'; its columns are index, sentence1, label"):
        glue("rte", tmp_path).load("train")


def test_metrics_are_those_of_the_definitions():
    generator = np.random.default_rng(0)
    given, wanted = generator.integers(0, 2, 200), generator.integers(0, 2, 200)
    given[:120] = wanted[:120]
    both, said, true = ((given & wanted).sum(), given.sum(), wanted.sum())
    measured = BinaryF1().measure(torch.from_numpy(given), torch.from_numpy(wanted))
    assert measured["f1"] == pytest.approx(2 * both / (said + true), abs=1e-6)
    assert measured["accuracy"] == pytest.approx((given == wanted).mean(), abs=1e-6)
    matthews = Matthews().measure(torch.from_numpy(given), torch.from_numpy(wanted))["matthews"]
    assert matthews == pytest.approx(np.corrcoef(given, wanted)[0, 1], abs=1e-6)
    assert Matthews().measure(torch.zeros(9).long(), torch.arange(9) % 2)["matthews"] == 0.0
    x, y = generator.normal(size=50), generator.normal(size=50)
    y += x
    found = Correlation().measure(torch.from_numpy(x), torch.from_numpy(y))
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-6)
    assert Correlation().measure(torch.ones(5), torch.arange(5.0))["pearson"] == 0.0


def test_the_paper_has_rows_for_its_models_and_for_the_ablation():
    assert glue_row("softmax", {})["cola", "matthews", "test"] == 0.18
    assert glue_row("fastfood-rks", {"learn": "none"})["sst2", "accuracy", "test"] == 0.814
    assert glue_row("performer", {}) == {}


def test_one_command_for_all(tree, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("one two three\nwords and other words\n" * 90)
    pretrain = ["pretrain", f"--data.train={tmp_path / 'book.txt'}", "--data.tokens.vocab-size=60", "--data.max-len=16"]
    run(capsys, *pretrain, "--attention=softmax", f"--out={tmp_path}", "--name=pre", *TINY)
    options = ["glue", "--data-root", tree, "--tasks", "mnli", "stsb", "--learning-rates", "1e-2", "1e-9"]
    options += ["--max-steps", "3", "--out", tmp_path, "--init-from", tmp_path / "pre", "--seeds", "0", "1"]
    out = run(capsys, *options, "--jobs", "2")
    assert "paper, softmax" in out
    report = json.loads((tmp_path / "glue" / "glue.json").read_text())
    row = report["models"][0]
    assert set(row["tasks"]) == {"mnli", "stsb"}
    best = row["tasks"]["mnli"]
    assert best["validation"][f"{best['learning_rate']:g}"] == max(best["validation"].values())
    assert len(best["mnli/accuracy/mismatched"]) == len(row["tasks"]["stsb"]["stsb/spearman/test"]) == 2
    # Two rates at the first seed, and the one that it chose at the other.
    again = run(capsys, *options)
    assert again.count("done already") == 2 * (2 + 1)
    assert json.loads((tmp_path / "glue" / "glue.json").read_text())["rows"] == report["rows"]
    mismatched = [row for row in report["rows"] if row["setting"] == "mnli-laptop-pretrained: mismatched accuracy, %"]
    assert [row["value"] for row in mismatched] == [100 * value for value in best["mnli/accuracy/mismatched"]]
    assert [(row["seed"], row["attention"]) for row in mismatched] == [(0, "softmax"), (1, "softmax")]
    folder = next((tmp_path / "glue").glob("pre*/mnli-lr0.01-seed0"))
    new = tmp_path / "new.tsv"
    new.write_text("index\tsentence1\tsentence2\n7\tone\ttwo\n")
    run(capsys, "predict", folder, new, "--out", tmp_path / "p.csv", "--keep", "index")
    (predicted,) = csv.DictReader((tmp_path / "p.csv").read_text().splitlines())
    assert predicted["index"] == "7"
    assert predicted["prediction"] in ("contradiction", "entailment", "neutral")
    assert "give models, each once, got none" in fails(capsys, 2, "glue", "--data-root", tree)
    assert "tasks must be of sst2" in fails(capsys, 2, "glue", "--tasks", "imdb", "--attentions", "softmax")


def test_the_ablation_is_one_command(tree, tmp_path, capsys, monkeypatch):
    """FastFood with nothing, S, and S, G and B learned: pretrained on a corpus each, fine-tuned, one table."""
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path / "cache"))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "book.txt").write_text("one two three\nwords and other words, and more of them\n" * 400)
    options = ["glue", "--data-root", tree, "--ablation", "--corpus", corpus, "--pretrain-steps", 1, "--max-steps", 1]
    out = run(capsys, *options, "--tasks", "rte", "--learning-rates", "1e-3", "--out", tmp_path)
    assert out.count("paper, fastfood-rks") == 3
    rows = json.loads((tmp_path / "glue" / "glue.json").read_text())["models"]
    assert [row["paper"]["sst2/accuracy/test"] for row in rows] == [0.814, 0.807, 0.828]
    names = ("fastfood-rks-learn=none", "fastfood-rks-learn=s", "fastfood-rks")
    trained = [trained_numbers(tmp_path / f"corpus-book-masked-laptop-{name}-seed0") for name in names]
    assert trained[0] == 0 < trained[1] < trained[2]
    assert "give --corpus" in fails(capsys, 2, "glue", "--ablation", "--pretrain-steps", 1)


def trained_numbers(folder):
    """How many numbers of its kernels a run trains."""
    model = load_run(folder, SilentReporter()).model
    return sum(x.numel() for name, x in model.named_parameters() if "spectrum" in name and x.requires_grad)
