"""Inputs without labels of Long Range Arena's tasks: read as the labelled ones are, predicted, and refused in words."""

import csv

import numpy as np
import pytest
from cli_support import fails, run
from PIL import Image as Picture

from klformer.errors import DataError
from klformer.lab.tasks import DataConfig, Image, ListOps, Retrieval, Sparsity, Text
from klformer.lab.tasks.config import GeneratedData
from klformer.lab.tasks.image import to_grey
from klformer.lab.tasks.sparsity import SparsityData
from klformer.lab.tasks.text import TextData

TEXTS = ["good", 'bétter, quoted "twice"', "x" * 50]


def write_csv(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def same(chunk, first, second=None):
    for found, expected in ((chunk.sequences, first), (chunk.second, second)):
        assert (found is None) == (expected is None)
        if found is not None:
            assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]


def test_texts_are_read_as_reviews_are(tmp_path):
    path = write_csv(tmp_path / "test.csv", ["text", "label", "id"], [(text, 1, n) for n, text in enumerate(TEXTS)])
    task = Text(TextData(root=tmp_path, max_len=20))
    chunks = list(task.read_inputs(path, keep=["id"], chunk=2))
    assert [chunk.kept for chunk in chunks] == [[("0",), ("1",)], [("2",)]]
    assert [chunk.rows for chunk in chunks] == [[2, 3], [4]]
    whole = task.load("test").first
    same(chunks[0], list(whole)[:2])
    same(chunks[1], list(whole)[2:])


def test_pairs_are_read_as_papers_are(tmp_path):
    pairs = [("one text", "anöther"), ("", "x"), ("long" * 9, "y")]
    rows = "".join(f"1\ta\tb\t{first}\t{second}\n" for first, second in pairs)
    (tmp_path / "new_aan_pairs.test.tsv").write_text(rows, encoding="utf-8")
    task = Retrieval(DataConfig(root=tmp_path, max_len=20))
    (chunk,) = task.read_inputs(write_csv(tmp_path / "new.csv", ["text1", "text2"], pairs), keep=[], chunk=9)
    expected = task.load("test")
    same(chunk, expected.first, expected.second)


def test_expressions_are_read_as_those_of_the_files(tmp_path):
    (tmp_path / "basic_test.tsv").write_bytes(b"Source\tTarget\n( ( [MAX 2 ) 9 ) ]\t9\n[MIN 4 [SM 7 8 ] ]\t4\n")
    task = ListOps(GeneratedData(root=tmp_path, max_len=4))
    (chunk,) = task.read_inputs(tmp_path / "basic_test.tsv", keep=["Target"], chunk=9)
    same(chunk, task.load("test").first)
    assert chunk.kept == [("9",), ("4",)]
    bad = write_csv(tmp_path / "bad.csv", ["Source"], [("[MAX 2 9",)])
    with pytest.raises(DataError, match=r"bad.csv, line 2: has 1 operators and 0 \]"):
        list(task.read_inputs(bad, keep=[], chunk=9))


def test_images_are_read_as_grey_pixels(tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    for number, image in enumerate(rgb):
        Picture.fromarray(image).save(tmp_path / f"{number}.png")
    task = Image(DataConfig(root=tmp_path, max_len=1000))
    (chunk,) = task.read_inputs(tmp_path, keep=[], chunk=9)
    same(chunk, to_grey(rgb).reshape(2, -1)[:, :1000])
    assert chunk.rows == [str(tmp_path / "0.png"), str(tmp_path / "1.png")]


def test_sequences_that_are_made_have_no_files():
    with pytest.raises(ValueError, match="sparsity reads no inputs from other files"):
        Sparsity(SparsityData()).read_inputs("x", keep=[], chunk=1)


def test_a_run_on_reviews_predicts(tmp_path, capsys):
    for part, name in ((part, name) for part in ("train", "test") for name in ("neg", "pos")):
        folder = tmp_path / "aclImdb" / part / name
        folder.mkdir(parents=True)
        for number in range(8):
            (folder / f"{number}_7.txt").write_text(name * 3)
    tiny = ["--model.num-heads", 2, "--model.head-dim", 4, "--training.max-steps", 2, "--training.evaluate-every", 2]
    options = ["--attention", "gmm-rks:num_frequencies=4", "--data.root", tmp_path, "--out", tmp_path, "--name", "run"]
    run(capsys, "train", "--task", "text", *options, *tiny)
    new = write_csv(tmp_path / "new.csv", ["text", "id"], [("fine", 7), ("dull", 8)])
    out = tmp_path / "predicted.csv"
    assert "2 predictions" in run(capsys, "predict", tmp_path / "run", new, "--out", out, "--keep", "id", "--draws", 3)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["7", "8"]
    for row in rows:
        assert float(row["p(neg)"]) + float(row["p(pos)"]) == pytest.approx(1)
        assert row["prediction"] == max(("neg", "pos"), key=lambda name: float(row[f"p({name})"]))
    (tmp_path / "new.txt").write_text("fine")
    error = fails(capsys, 1, "predict", tmp_path / "run", tmp_path / "new.txt", "--out", out)
    assert "new.txt: must be a table (.csv, .tsv, .parquet, .jsonl) with the column 'text'" in error
    headless = write_csv(tmp_path / "other.csv", ["body"], [("fine",)])
    error = fails(capsys, 1, "predict", tmp_path / "run", headless, "--out", out)
    assert "has no column 'text'; its columns are body; --data.text-column names another" in error
