"""Retrieval: pairs of texts in LRA's files."""

import numpy as np
import pytest

from klformer.errors import DataError
from klformer.lab.tasks import DataConfig, Retrieval

ROWS = [b"1.0\tP1\tP2\tone text\tan\xc3\xb6ther", b'0\tP3\tP4\t"not quoted\tmore\r', b"0.0\tP5\tP6\t\tx"]


def fill(folder, rows=ROWS):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("train", "eval", "test"), start=1):
        (folder / f"new_aan_pairs.{name}.tsv").write_bytes(b"".join(row + b"\n" for row in rows[:number]))


def task(root, **config):
    return Retrieval(DataConfig(root=root, **config))


def text(ids):
    return bytes(i - 1 for i in ids).decode()


@pytest.mark.parametrize("folder", ["lra_release/lra_release/tsv_data", "lra_release/tsv_data", "tsv_data", "."])
def test_reads_pairs_from_where_the_archive_unpacks(tmp_path, folder):
    fill(tmp_path / folder)
    parts = [task(tmp_path).load(part) for part in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [1, 2, 3]
    test = parts[2]
    assert [text(ids) for ids in test.first] == ["one text", '"not quoted', ""]
    assert [text(ids) for ids in test.second] == ["anöther", "more", "x"]
    assert test.targets.tolist() == [1, 0, 0]
    assert test.first.values.dtype == np.uint8
    assert task(tmp_path).location() == str(tmp_path / folder)


def test_cuts_both_sides(tmp_path):
    fill(tmp_path)
    pairs = task(tmp_path, max_len=3).load("test")
    assert pairs.first.lengths.tolist() == [3, 3, 0]
    assert pairs.second.lengths.tolist() == [3, 3, 1]


def test_both_protocols_validate_on_the_official_file(tmp_path):
    fill(tmp_path)
    assert len(task(tmp_path, protocol="lra").load("validation")) == 2
    assert "validation set of the data" in task(tmp_path, protocol="lra").describe_protocol()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"1\tP1\tP2\tcut here", r"line 2: a row must have 5 fields .*, got 4"),
        (b"1\tP1\tP2\ta\tb\tc", r"line 2: a row must have 5 fields .*, got 6"),
        (b"", r"line 2: a row must have 5 fields .*, got 1"),
        (b"2\tP1\tP2\ta\tb", "line 2: the label must be a whole number from 0 to 1, got '2'"),
        (b"label\tid1\tid2\ttext1\ttext2", "line 2: the label must be .*, got 'label'"),
        (b"\xff\tP1\tP2\ta\tb", "line 2: the label must be"),
    ],
)
def test_malformed_rows(tmp_path, row, problem):
    fill(tmp_path, [ROWS[0], row, ROWS[1]])
    with pytest.raises(DataError, match=rf"new_aan_pairs\.eval\.tsv, {problem}"):
        task(tmp_path).load("validation")


def test_the_last_line_needs_no_end(tmp_path):
    fill(tmp_path)
    whole = task(tmp_path).load("test").fingerprint()
    path = tmp_path / "new_aan_pairs.test.tsv"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert task(tmp_path).load("test").fingerprint() == whole


def test_empty_and_missing_files(tmp_path):
    fill(tmp_path)
    (tmp_path / "new_aan_pairs.train.tsv").write_bytes(b"")
    with pytest.raises(DataError, match=r"train\.tsv: has no rows"):
        task(tmp_path).load("train")
    (tmp_path / "new_aan_pairs.train.tsv").unlink()
    with pytest.raises(DataError, match=r"train\.tsv: the file is missing"):
        task(tmp_path).load("train")


def test_nothing_found(tmp_path):
    assert "nothing found" in task(tmp_path).location()
    with pytest.raises(DataError, match=r"no new_aan_pairs\.test\.tsv in any of lra_release/lra_release/tsv_data, "):
        task(tmp_path).load("test")


def test_a_file_of_another_size_than_the_official_one_is_noted(tmp_path):
    fill(tmp_path)
    pairs = task(tmp_path)
    assert pairs.notes() == []
    pairs.load("test")
    assert pairs.notes() == [f"test has 3 examples, the official data 17,437: {tmp_path}"]
