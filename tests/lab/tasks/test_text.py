"""Text: the tree of reviews, tables and the hub."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet
from user_support import plain_user

from klformer.errors import DataError
from klformer.lab.tasks import Text
from klformer.lab.tasks.text import TextData

REVIEWS = {
    ("train", "neg"): ["bad", "worse"],
    ("train", "pos"): ["good", "bétter"],
    ("test", "neg"): ["no"],
    ("test", "pos"): ["yes"],
}


def text(ids):
    return bytes(i - 1 for i in ids).decode()


def task(root, **config):
    return Text(TextData(root=root, **{"protocol": "lra", **config}))


def contents(examples):
    return [(text(ids), int(label)) for ids, label in zip(examples.first, examples.targets, strict=True)]


@pytest.fixture
def tree(tmp_path):
    for (part, name), reviews in REVIEWS.items():
        folder = tmp_path / "aclImdb" / part / name
        folder.mkdir(parents=True)
        for number, review in enumerate(reviews):
            (folder / f"{number}_7.txt").write_text(review, encoding="utf-8")
    return tmp_path


def test_reads_the_tree(tree):
    expected = [("bad", 0), ("worse", 0), ("good", 1), ("bétter", 1)]
    assert contents(task(tree).load("train")) == expected
    assert contents(task(tree / "aclImdb").load("train")) == expected
    assert contents(task(tree).load("test")) == [("no", 0), ("yes", 1)]
    assert task(tree).location() == str(tree / "aclImdb")


def test_reviews_are_in_the_order_of_their_numbers(tree):
    folder = tree / "aclImdb" / "train" / "neg"
    for number in range(2, 12):
        (folder / f"{number}_1.txt").write_text(str(number))
    loaded = [review for review, _ in contents(task(tree).load("train"))]
    assert loaded[2:12] == [str(number) for number in range(2, 12)]


def test_bytes_are_cut_and_need_not_be_utf8(tree):
    (tree / "aclImdb" / "train" / "neg" / "0_7.txt").write_bytes(b"\xff\x00z" * 10)
    examples = task(tree, max_len=4).load("train")
    assert examples.first[0].tolist() == [256, 1, 123, 256]
    assert examples.lengths.tolist() == [4, 4, 4, 4]
    assert Text.vocab_size == 257


def test_protocols(tree):
    assert contents(task(tree).load("validation")) == contents(task(tree).load("test"))
    held_out = task(tree, protocol="holdout", holdout_fraction=0.5)
    train, validation = contents(held_out.load("train")), contents(held_out.load("validation"))
    assert len(train) == len(validation) == 2
    assert sorted(train + validation) == sorted(contents(task(tree).load("train")))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "0_7.txt").unlink(), "neg: review 0 is missing, 1_7.txt comes instead; unpack"),
        (
            lambda folder: (folder / "1_9.txt").write_text("twice"),
            r"neg: review 1 is there twice, 1_7\.txt and 1_9\.txt; unpack",
        ),
        (
            lambda folder: (folder / "0_10.txt").write_text("twice, and more follow"),
            r"neg: review 0 is there twice, 0_10\.txt and 0_7\.txt; unpack",
        ),
        (lambda folder: (folder / "notes.txt").write_text("x"), r"notes.txt: a review must be named ID_RATING.txt"),
        (lambda folder: (folder / "0_7.txt").write_text(""), "0_7.txt: the review is empty"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], r"neg: has no reviews"),
        (lambda folder: folder.rename(folder.parent / "other"), "neg: the folder of reviews is missing"),
    ],
)
def test_damaged_trees(tree, damage, problem):
    damage(tree / "aclImdb" / "train" / "neg")
    with pytest.raises(DataError, match=problem):
        task(tree).load("train")


def test_a_folder_of_reviews_that_can_not_be_read(tree, monkeypatch):
    monkeypatch.chdir(tree)
    for path in (tree, *tree.rglob("*")):
        path.chmod(0o755)
    locked = tree / "aclImdb" / "train" / "neg"
    locked.chmod(0)
    with plain_user(), pytest.raises(DataError, match=r"^aclImdb/train/neg: can't be read: Permission denied"):
        task(Path()).load("train")
    locked.chmod(0o755)


def write_table(path, rows, header=("id", "text", "label")):
    if path.suffix == ".parquet":
        columns = zip(*rows, strict=True) if rows else [[] for _ in header]
        parquet.write_table(pyarrow.table([pyarrow.array(column) for column in columns], names=header), path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([header, *rows])


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_reads_tables(tmp_path, suffix):
    rows = [(1, 'a "quoted",\nbroken\ttext', 1), (2, "é" * 70_000, 0)]
    write_table(tmp_path / f"train{suffix}", rows)
    write_table(tmp_path / f"test{suffix}", rows[:1])
    assert contents(task(tmp_path, max_len=200_000).load("train")) == [(row[1], row[2]) for row in rows]
    assert len(task(tmp_path).load("test")) == 1
    assert f"train{suffix}" in task(tmp_path).location()


def test_other_columns_and_words_as_labels(tmp_path):
    write_table(tmp_path / "train.csv", [("fine", "positive"), ("dull", "Negative")], header=("review", "sentiment"))
    loaded = task(tmp_path, text_column="review", label_column="sentiment").load("train")
    assert contents(loaded) == [("fine", 1), ("dull", 0)]


def test_a_validation_table_is_used_by_both_protocols(tmp_path):
    for number, part in enumerate(("train", "validation", "test"), start=1):
        write_table(tmp_path / f"{part}.csv", [(0, part, 1)] * number)
    for protocol in ("lra", "holdout"):
        parts = [task(tmp_path, protocol=protocol).load(part) for part in ("train", "validation", "test")]
        assert [len(part) for part in parts] == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty; a header with 'text' and 'label' must come first"),
        (b"text,label\n", "has no rows"),
        (b"text,sentiment\na,1\n", "line 1: has no column 'label'; its columns are text, sentiment"),
        (b"review,label\na,1\n", "line 1: has no column 'text'"),
        (b'text,label\n"a\nb",1\nc\n', "line 4: a row must have 2 fields, as the header, got 1"),
        (b"text,label\na,1\nb,1,1\n", "line 3: a row must have 2 fields, as the header, got 3"),
        (b"text,label\na,1\nb,2\n", "line 3: the label must be 0 or 1 .*got '2'"),
        (b"text,label\n,1\n", "line 2: the text is empty"),
        (
            b"text,label\na,1\n\xe9t\xe9,1\n",
            "line 3: is not UTF-8: .* at byte 0 of the line; .*--data.encoding latin-1",
        ),
        (b'text,label\na,1\n"b,1\n', "line 3: can't be parsed: unexpected end of data"),
    ],
)
def test_malformed_tables(tmp_path, content, problem):
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"train\.csv.*{problem}"):
        task(tmp_path).load("train")


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    (tmp_path / "train.csv").write_bytes(b"\xef\xbb\xbftext,label\na,1\n")
    assert contents(task(tmp_path).load("train")) == [("a", 1)]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize("twice", ["text", "label"])
def test_a_needed_column_is_there_once(tmp_path, suffix, twice):
    write_table(tmp_path / f"train{suffix}", [("a", "1", "b")], header=("text", "label", twice))
    with pytest.raises(
        DataError,
        match=rf"train\{suffix}.*: must have one column '{twice}', got 2; its columns are text, label, {twice}",
    ):
        task(tmp_path).load("train")
    write_table(tmp_path / f"train{suffix}", [("x", "a", "1", "y")], header=("id", "text", "label", "id"))
    assert contents(task(tmp_path).load("train")) == [("a", 1)]


def test_malformed_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    write_table(path, [(0, "a", 1), (0, None, 1)])
    with pytest.raises(DataError, match=r"train\.parquet, row 2: the column 'text' must hold text, got None"):
        task(tmp_path).load("train")
    write_table(path, [("a", 1)], header=("review", "label"))
    with pytest.raises(DataError, match="has no column 'text'"):
        task(tmp_path).load("train")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"train\.parquet: is not a whole parquet file"):
        task(tmp_path).load("train")


@pytest.mark.parametrize("text", [b"a", 3])
def test_a_parquet_column_that_is_not_text(tmp_path, text):
    write_table(tmp_path / "train.parquet", [(text, 1)], header=("text", "label"))
    with pytest.raises(DataError, match=rf"train\.parquet, row 1: the column 'text' must hold text, got {text!r}$"):
        task(tmp_path).load("train")


def test_a_missing_table_is_not_looked_for_on_the_hub(tmp_path):
    write_table(tmp_path / "train.csv", [(0, "a", 1)])
    with pytest.raises(DataError, match=r"test\.csv: the file is missing"):
        task(tmp_path).load("test")


def test_the_hub_comes_last(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return {"text": ["è", "b"], "label": [1, 0]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path))
    assert contents(task(None).load("test")) == [("è", 1), ("b", 0)]
    assert asked == [("stanfordnlp/imdb", "test")]
    assert "hub" in task(None).location()
    with pytest.raises(DataError, match=r"has none of aclImdb/.*; --data\.root must be the folder with one of them"):
        task(tmp_path).load("test")
    assert "the hub" not in task(tmp_path).location()
    assert len(asked) == 1, "a folder that was named is not replaced by other data"


def test_without_a_hub_the_error_says_what_was_looked_for(tmp_path, monkeypatch):
    def load_dataset(name, split):
        raise ConnectionError("no network\nand a long explanation")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"aclImdb.*\{csv,tsv,.*\}.*hub.*ConnectionError: no network$") as caught:
        task(None).load("train")
    assert str(tmp_path) in str(caught.value)


def test_only_the_official_tree_has_an_official_size(tree):
    reviews = task(tree)
    reviews.load("test")
    (sentence,) = reviews.notes()
    assert sentence.startswith(f"test has {reviews.sizes['test']} examples, the official data 25,000")
    (tree / "tables").mkdir()
    write_table(tree / "tables" / "test.csv", [("1", "fine", "1")])
    own = task(tree / "tables")
    own.load("test")
    assert own.notes() == []
