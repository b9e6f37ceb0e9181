"""Somebody's own tables: every format says the same, a run remembers what it found, and what is wrong is said with
file, row and flag."""

import codecs
import csv
import json

import numpy as np
import pyarrow
import pytest
from cli_support import fails, run
from pyarrow import parquet

from klformer.errors import DataError
from klformer.lab.tasks import build_task
from klformer.lab.tasks.csv import CsvData
from klformer.lab.training.objectives import Regression

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
        (b"text,label\nx,1\n,2\n", {}, "line 3: the text is empty"),
        (b"text,label\nx,1\ny,\n", {}, "line 3: the label is empty"),
        (b"text,label\nx,1\ny,1\n", {}, "the column of labels must have two classes or more, got only '1'"),
        (b"text,label\nx,a\n", {"target": "number"}, "must be a finite number, got 'a'; --data.target classes"),
        (b"text,label\n1 2,a\n1 x,b\n", {"inputs": "integers"}, "line 3: must hold numbers: .*'x'"),
        (b"text,label\n1 2.5,a\n", {"inputs": "integers"}, "line 2: must hold whole numbers; --data.inputs floats"),
        (b"text,label\n1 nan,a\n", {"inputs": "floats"}, "line 2: must hold finite numbers"),
        (b'text,label\n"x,1\n', {}, r"can't be parsed: .*--data\.no-quoted"),
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
    with pytest.raises(DataError, match=r"c\.parquet, row 2: must hold text, got None"):
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
