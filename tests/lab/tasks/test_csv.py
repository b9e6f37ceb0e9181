"""Somebody's own tables: every format says the same, a run remembers what it found, and what is wrong is said with
file, row and flag."""

import codecs
import csv
import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from cli_support import fails, run
from pyarrow import parquet

from klformer.errors import DataError, FileError
from klformer.lab.cli.main import main
from klformer.lab.tasks import build_task
from klformer.lab.tasks.csv import CsvData
from klformer.lab.training.objectives import Classification, Regression

ROWS = [("one; good", "yes"), ('two "bad"', "no"), ("three\nlines", "yes"), ("vier", "maybe")] * 10
SMALL = [
    *["--model.num-layers=1", "--model.num-heads=2", "--model.model-dim=8", "--model.head-dim=4", "--model.ffn-dim=8"],
    *["--model.head-hidden-dim=8", "--training.max-steps=4", "--training.evaluate-every=2"],
    *["--training.checkpoint-every=2", "--training.evaluation-draws=2", "--data.max-len=32"],
]


def write(path, rows, header=("text", "label")):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.table(dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))), path)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def task(**config):
    return build_task("csv", CsvData(**config), quiet=True)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_format_gives_the_same(tmp_path, suffix):
    read = task(train=write(tmp_path / f"own{suffix}", ROWS))
    train, validation, test = (read.load(split) for split in ("train", "validation", "test"))
    assert [len(train), len(validation), len(test)] == [32, 4, 4]
    assert read.class_names() == ("maybe", "no", "yes")
    assert read.objective().num_outputs == 3
    assert read.guess() == 0.5
    everything = {bytes(ids - 1) for split in (train, validation, test) for ids in split.first}
    assert everything == {text.encode() for text, _ in ROWS}
    by_text = {bytes(ids - 1).decode(): target for ids, target in zip(train.first, train.targets, strict=True)}
    assert all(by_text[text] == ["maybe", "no", "yes"].index(label) for text, label in ROWS)


def test_parts_of_their_own(tmp_path):
    for number, name in enumerate(("train", "dev", "test"), start=1):
        write(tmp_path / f"{name}.csv", ROWS[: 4 * number])
    read = task(root=tmp_path)
    assert [len(read.load(split)) for split in ("train", "validation", "test")] == [4, 8, 12]
    assert (read.validation_source(), read.test_source(), read.detail()) == ("file", "file", tmp_path.name)
    alone = task(root=tmp_path, train=tmp_path / "test.csv")
    assert (alone.validation_source(), alone.test_source()) == ("train", "train"), "the root is another data set"


def test_two_texts_have_a_separator_and_types(tmp_path):
    path = write(tmp_path / "pairs.csv", [("ab", "c", 1), ("d", "efg", 0)] * 10, header=("a", "b", "label"))
    read = task(train=path, text_column="a", second_column="b")
    sequences = {tuple(ids.tolist()) for ids in read.load("train").first}
    assert sequences == {(98, 99, 257, 100), (101, 257, 102, 103, 104)}
    assert read.shape().separator == 257


def test_numbers_to_predict(tmp_path):
    path = write(tmp_path / "n.csv", [(f"text {n}", 100.0 + n) for n in range(40)])
    read = task(train=path, target="number")
    objective = read.objective()
    assert isinstance(objective, Regression)
    assert (objective.mean, round(objective.scale, 3)) == (119.5, round(np.arange(40).std(), 3))
    assert read.load("train").targets.dtype == np.float64
    assert (read.class_names(), read.guess()) == (None, None)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_sequences_of_numbers(tmp_path, suffix):
    lists = [[3, -1, 3], [7], [100, 3]] * 10
    cells = [" ".join(map(str, row)) for row in lists] if suffix == ".csv" else lists
    path = write(tmp_path / f"s{suffix}", [(cell, n % 2) for n, cell in enumerate(cells)])
    integers = task(train=path, inputs="integers")
    assert {tuple(ids.tolist()) for ids in integers.load("train").first} == {(2, 1, 2), (3,), (4, 2)}
    assert integers.shape().vocab_size == 5
    floats = task(train=path, inputs="floats").load("train").first
    assert (floats.width, floats.values.dtype) == (1, np.float32)
    assert abs(float(floats.values.mean())) < 0.2
    assert task(train=path, inputs="floats").shape().input_dim == 1


def test_what_was_learned_is_remembered(tmp_path):
    path = write(tmp_path / "own.csv", ROWS)
    first = task(train=path, tokens={"kind": "wordpiece", "vocab_size": 40})
    knowledge = json.loads(json.dumps(first.learn()))
    other = task(train=tmp_path / "gone.csv", tokens={"kind": "wordpiece"})
    other.know(knowledge)
    assert other.class_names() == ("maybe", "no", "yes")
    chunks = list(other.read_inputs(write(tmp_path / "new.csv", ROWS[:5]), keep=["label"], chunk=2))
    assert [chunk.rows for chunk in chunks] == [[2, 3], [4, 6], [7]], "lines at which the rows begin"
    assert chunks[0].kept == [("yes",), ("no",)]
    assert chunks[0].sequences[0].tolist() == first.inputs.encode([ROWS[0][:1]], 32)[0].tolist()


BAD = "data.csv"


@pytest.mark.parametrize(
    ("content", "config", "problem"),
    [
        (b"a,b\n1,2\n", {}, r"line 1: has no column 'text'; its columns are a, b; --data\.text-column names another"),
        (b"text,b\n1,2\n", {}, r"has no column 'label'; .*; --data\.label-column names another"),
        (b"text,label\nx,1\n\xe9,2\n", {}, r"line 3: is not UTF-8: .*--data\.encoding latin-1"),
        (
            b"text,label\nx,1\ny,2,3\n",
            {},
            r"line 3: a row must have 2 fields, as the header, got 3; .*--data\.delimiter",
        ),
        (b"text:label\nx:1\n", {}, r"has no column 'text'; its columns are text:label; .*--data\.delimiter"),
        (b"text,label\nx,1\n,2\n", {}, r"line 3: the column 'text' is empty; --data\.on-missing skip"),
        (b"text,label\nx,1\ny,\n", {}, "line 3: the column 'label' is empty"),
        (b"text,label\nx,1\ny,1\n", {}, "the column of labels must have two classes or more, got only '1'"),
        (b"text,label\nx,a\n", {"target": "number"}, "must be a finite number, got 'a'; --data.target classes"),
        (b"text,label\n1 2,a\n1 x,b\n", {"inputs": "integers"}, "line 3: must hold numbers: .*'x'"),
        (
            b"text,label\n1 2.5,a\n",
            {"inputs": "integers"},
            "line 2: must hold whole numbers below .*; --data.inputs floats",
        ),
        (b"text,label\n1 nan,a\n", {"inputs": "floats"}, "line 2: must hold finite numbers"),
        (b'text,label\n"x,1\n', {}, r"line 2: can't be parsed: .*--data\.no-quoted"),
        (
            b'text,label\ny,1\n"x,1\ny,2\ny,3\n',
            {},
            r"line 3: a quote that opens in this row is not closed properly up to line 5",
        ),
        (
            b'text,label\ny,1\n"x,1\ny,2\n"y",3\n',
            {},
            r"line 3: a quote that opens in this row is not closed properly up to line 5",
        ),
        (b"text,label\nx,1\n", {"encoding": "latin1x"}, r"data\.encoding must be one that Python knows"),
        (b"text,label\nx,1\n", {"delimiter": "ab"}, r"data\.delimiter must be one character"),
    ],
)
def test_malformed_tables_are_one_line_with_the_flag(tmp_path, content, config, problem):
    (tmp_path / BAD).write_bytes(content)
    with pytest.raises(DataError, match=problem) as caught:
        task(train=tmp_path / BAD, **config).load("train")
    assert "\n" not in str(caught.value)


def test_blank_lines_are_no_rows(tmp_path):
    (tmp_path / "data.csv").write_bytes(b"\ntext,label\n\nx,1\n\ny,2\n\n")
    rows = list(task(train=tmp_path / "data.csv").labelled("train"))
    assert [(place.number, cells, label) for place, cells, label in rows] == [(4, ("x",), "1"), (6, ("y",), "2")]


def test_labels_that_train_does_not_have(tmp_path):
    write(tmp_path / "train.csv", ROWS)
    write(tmp_path / "test.csv", [*ROWS, ("x", "never")])
    with pytest.raises(
        DataError, match=r"test\.csv, line 52: the label 'never' is not in the training rows; .*'maybe'"
    ):
        task(root=tmp_path).load("test")


def test_other_malformed_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": 1}\n{"text": "y"\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: is not JSON"):
        task(train=tmp_path / "a.jsonl").load("train")
    (tmp_path / "b.jsonl").write_text('{"text": "x", "label": 1}\n{"text": "y"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: has no column 'label'"):
        task(train=tmp_path / "b.jsonl").load("train")
    path = write(tmp_path / "c.parquet", [("x", "1"), (None, "2")])
    with pytest.raises(DataError, match=r"c\.parquet, row 2: the column 'text' is empty"):
        task(train=path).load("train")
    with pytest.raises(DataError, match=r"d\.txt: a table must be one of \.csv"):
        task(train=tmp_path / "d.txt").load("train")
    with pytest.raises(DataError, match=r"e\.csv: the file is missing"):
        task(train=tmp_path / "e.csv").load("train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: has none of train\.\{csv,.*\}, --data\.train FILE"):
        task(root=tmp_path / "empty").load("train")


def test_a_file_without_a_header(tmp_path):
    (tmp_path / "plain.csv").write_text("".join(f"{label}|{text!r}\n" for text, label in ROWS))
    read = task(train=tmp_path / "plain.csv", column_names=("label", "text"))
    assert len(read.load("train")) == 32


@pytest.mark.parametrize("out", ["p.csv", "p.jsonl", "p.parquet"])
def test_semicolons_latin_1_and_a_mark_train_and_predict_with_a_command_each(tmp_path, capsys, out):
    classes = ["été", "hiver", "printemps", "automne", "nuit"]
    lines = ["texte;classe"] + [f'"n° {n}; où";{classes[n % 5]}' for n in range(60)]
    path = tmp_path / "saisons.csv"
    path.write_bytes(codecs.BOM_UTF8 + "\r\n".join(lines).encode("latin-1"))
    columns = ["--data.text-column=texte", "--data.label-column=classe", "--data.encoding=latin-1"]
    options = ["--task=csv", f"--data.train={path}", "--attention=gmm-prf:num_frequencies=8", f"--out={tmp_path}"]
    assert "--data.encoding latin-1" in fails(capsys, 1, "train", *options, *columns[:2], *SMALL)
    run(capsys, "train", *options, *columns, *SMALL)
    folder = tmp_path / "csv-saisons-laptop-gmm-prf-num_frequencies=8-seed0"
    new = tmp_path / "new.csv"
    new.write_bytes("id;texte\nun;où\ndeux;n° 3\n".encode("latin-1"))
    path.unlink()  # a run needs no training data to predict
    said = run(capsys, "predict", folder, new, "--out", tmp_path / out, "--draws", 3, "--keep", "id")
    assert "2 predictions" in said
    rows = read_back(tmp_path / out)
    assert [row["id"] for row in rows] == ["un", "deux"]
    for row in rows:
        chances = [float(row[f"p({name})"]) for name in classes]
        assert abs(sum(chances) - 1) < 1e-4
        assert row["prediction"] == classes[int(np.argmax(chances))]
        assert float(row["probability"]) == max(chances)
        assert float(row["deviation"]) > 0
    error = fails(capsys, 1, "predict", folder, new, "--out", tmp_path / out, "--data.text-column", "body")
    assert "has no column 'body'; its columns are id, texte; --data.text-column names another" in error
    assert "--out must end in one of .csv" in fails(capsys, 2, "predict", folder, new, "--out", tmp_path / "p.txt")
    assert len(read_back(tmp_path / out)) == 2, "what failed has changed nothing"


def read_back(path):
    if path.suffix == ".csv":
        return list(csv.DictReader(path.read_text().splitlines()))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return parquet.read_table(path).to_pylist()


def test_rows_that_a_pair_of_stray_quotes_swallows_are_noted(tmp_path):
    lines = [f"text {number},{number % 2}" for number in range(60)]
    lines[10], lines[50] = '"' + lines[10], lines[50].split(",")[0] + '",0'
    (tmp_path / "stray.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    read = task(train=tmp_path / "stray.csv")
    assert len(read.load("train")) == 16
    (note,) = read.notes()
    assert note.startswith("the row in line 12 of stray.csv spans 41 lines; if a stray quote")
    unquoted = task(train=tmp_path / "stray.csv", quoted=False)
    assert len(unquoted.load("train")) == 48
    assert unquoted.notes() == []


def test_fields_longer_than_pythons_limit(tmp_path):
    path = write(tmp_path / "long.csv", [("x" * 200_000, "yes"), ("y" * 200_000, "no")] * 5)
    assert task(train=path, max_len=200_000).load("train").lengths.tolist() == [200_000] * 8
    assert len(list(task(train=path).unlabelled(path, []))) == 10


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows_that_lack_something(tmp_path, suffix):
    empty = "" if suffix == ".csv" else None
    path = write(tmp_path / f"own{suffix}", [*ROWS, (empty, "yes"), ("text", empty), (empty, "no")])
    new = write(tmp_path / f"new{suffix}", [("a", "1"), (empty, "2"), ("c", "3")], header=("text", "id"))
    skipping = task(train=path, on_missing="skip")
    assert len(skipping.load("train")) == 32
    (note,) = skipping.notes()
    assert f"of own{suffix} without a text or a label: 3, left out" in note
    assert [kept for chunk in skipping.read_inputs(new, keep=["id"], chunk=2) for kept in chunk.kept] == [
        ("1",),
        ("3",),
    ]
    reading = task(train=write(path, [*ROWS, (empty, "yes")]), on_missing="empty")
    lengths = np.concatenate([reading.load(split).lengths for split in ("train", "validation", "test")])
    assert sorted(lengths)[:2] == [0, 4]
    assert "without a text or a label: 1, read as empty" in reading.notes()[0]
    (chunk,) = reading.read_inputs(new, keep=["id"], chunk=9)
    assert chunk.sequences.lengths.tolist() == [1, 0, 1]


def test_pipes_are_no_tables(tmp_path):
    os.mkfifo(tmp_path / "train.csv")
    with pytest.raises(FileError, match=r"train\.csv must be a regular file, not a pipe"):
        task(train=tmp_path / "train.csv").load("train")


def test_every_part_has_its_share_of_each_class(tmp_path):
    rows = [(f"text {n}", "rare" if n % 20 == 0 else "often" if n % 5 else "some") for n in range(400)]
    read = task(train=write(tmp_path / "own.csv", rows), stratified=True)
    counts = [np.bincount(read.load(split).targets, minlength=3).tolist() for split in ("train", "validation", "test")]
    assert counts == [[256, 16, 48], [32, 2, 6], [32, 2, 6]]
    texts = {bytes(ids) for split in ("train", "validation", "test") for ids in read.load(split).first}
    assert len(texts) == 400
    numbers = task(train=write(tmp_path / "n.csv", [(f"text {n}", n) for n in range(40)]), target="number")
    plain = numbers.load("test").targets
    again = task(train=tmp_path / "n.csv", target="number", stratified=True)
    assert again.load("test").targets.tolist() == plain.tolist(), "numbers have no classes"


@pytest.fixture
def trained(home):
    names = ["=HYPERLINK(1)", "\x1b[31mred", "-1", "+x"]
    path = write(home / "own.csv", [(f"text {n}", names[n % 4]) for n in range(80)])
    main(["train", "--task=csv", f"--data.train={path}", "--attention=linear-elu", "--name=own", "--quiet", *SMALL])
    return home / "runs" / "own"


def test_predictions_replace_nothing_that_is_read(trained, home, capsys):
    (home / "new.csv").write_text("text\nx\n")
    (home / "link.csv").symlink_to("new.csv")
    before = (home / "own.csv").read_bytes()
    for out in ("new.csv", "link.csv", "./new.csv", "own.csv", "runs/own/metrics.jsonl"):
        error = fails(capsys, 2, "predict", trained, "new.csv", "--out", out)
        assert f"--out must be another file than those that are read, got '{Path(out)}'" in error
    assert (home / "new.csv").read_text() == "text\nx\n"
    assert (home / "own.csv").read_bytes() == before


def test_predictions_in_csv_hold_no_formulas_and_command_no_terminal(trained, home, capsys):
    (home / "new.csv").write_text('text,id\n"x",=1+1\ny,-7\n')
    run(capsys, "predict", trained, "new.csv", "--out", "p.csv", "--keep", "id")
    said = (home / "p.csv").read_text()
    assert "\x1b" not in said
    first, second = csv.DictReader(said.splitlines())
    assert [first["id"], second["id"]] == ["'=1+1", "-7"]
    assert {row["prediction"] for row in (first, second)} <= {"'=HYPERLINK(1)", "\\x1b[31mred", "-1", "'+x"}
    assert "p(=HYPERLINK(1))" in first
    run(capsys, "predict", trained, "new.csv", "--out", "p.jsonl", "--keep", "id")
    assert [row["id"] for row in read_back(home / "p.jsonl")] == ["=1+1", "-7"]
    assert "\x1b" not in run(capsys, "eval", trained)


def test_predictions_from_a_pipe_into_a_pipe(trained, home, capfdbinary, monkeypatch):
    def given(text):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))

    given(b"text,id\nx,1\n,2\n")
    main(["predict", str(trained), "-", "--out", "-", "--keep", "id", "--data.on-missing", "skip"])
    out, note = capfdbinary.readouterr()
    (row,) = csv.DictReader(out.decode().splitlines())
    assert (row["row"], row["id"]) == ("2", "1")
    assert b"stdin.csv without a text or a label: 1, left out" in note
    given(b"text,id\nx,1\n,2\n")
    with pytest.raises(SystemExit):
        main(["predict", str(trained), "-", "--out", "-"])
    out, error = capfdbinary.readouterr()
    assert out == b""
    assert error.startswith(b"klformer: stdin.csv, line 3: the column 'text' is empty")


def test_answers_that_are_not_finite_are_no_predictions(trained, home, capsys, monkeypatch):
    (home / "new.csv").write_text("text\nx\ny\n")
    answers = Classification.answers

    def broken(self, outputs):
        found = answers(self, outputs)
        found[..., 1, :] = torch.nan
        return found

    monkeypatch.setattr(Classification, "answers", broken)
    error = fails(capsys, 1, "predict", trained, "new.csv", "--out", "p.csv")
    assert "the model's answer to row 3 is not a finite number" in error
    assert not (home / "p.csv").exists()


def test_what_a_result_is_worth_is_said(home, capsys):
    rows = [(f"text {n}", "abc"[n % 3] if n != 7 else "d") for n in range(60)]
    path = write(home / "own.csv", rows)
    said = run(capsys, "train", "--task=csv", f"--data.train={path}", "--attention=linear-elu", *SMALL)
    assert "note: the test set has only 6 examples: each that is right or wrong counts 16.7 points" in said
    assert "note: test has no example of 1 of 4 classes, such as d" in said
    assert "note: that is not significantly better than the most frequent class. In training it was right in" in said
    assert "--model.convolution-width 3" in said
