"""Files are written as a whole or not at all, and changes to generated ones are noticed."""

import os
import time
from pathlib import Path

import pytest
from user_support import plain_user

from klformer.errors import DataError
from klformer.lab.tasks.files import GeneratedFolder, entries, exists, is_folder, parse_label, reading


def test_reading_errors_name_the_file(tmp_path):
    path = tmp_path / "nothing"
    with pytest.raises(DataError, match="nothing: the file is missing"), reading(path):
        path.read_bytes()
    with pytest.raises(DataError, match="can't be read: Is a directory"), reading(tmp_path):
        tmp_path.read_bytes()


@pytest.mark.parametrize("text", ["1", "1.0", " 1 "])
def test_labels(text, tmp_path):
    assert parse_label(text, 2, file=tmp_path) == 1


@pytest.mark.parametrize("text", ["2", "-1", "0.5", "", "nan", "inf", "label"])
def test_labels_out_of_range(text, tmp_path):
    with pytest.raises(DataError, match=r"rows, line 7: the label must be a whole number from 0 to 1, got "):
        parse_label(text, 2, file=tmp_path / "rows", line=7)


@pytest.fixture
def generated(tmp_path):
    folder = GeneratedFolder(tmp_path / "generated", {"seed": 3})
    folder.path.mkdir(parents=True)
    (folder.path / "data").write_bytes(b"0123456789")
    folder.complete({"data": 10})
    return folder


def test_whole_files_are_verified(generated):
    assert generated.is_complete
    assert generated.verified("data") == (generated.path / "data", 10)


def test_changes_are_noticed(generated):
    data = generated.path / "data"
    data.write_bytes(b"012345678")
    with pytest.raises(DataError, match="has 9 bytes where the manifest says 10; delete the folder"):
        generated.verified("data")
    data.write_bytes(b"0123456780")
    with pytest.raises(DataError, match="was changed after it was generated"):
        generated.verified("data")
    data.unlink()
    with pytest.raises(DataError, match="data: the file is missing"):
        generated.verified("data")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"settings": {"seed": 3}, "files": {}}', b"\xff"])
def test_a_broken_manifest_is_noticed(generated, content):
    (generated.path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match="is not a manifest of data; delete the folder"):
        generated.verified("data")


def test_other_settings_are_noticed(generated):
    with pytest.raises(DataError, match=r"was made with \{'seed': 3\}, not with \{'seed': 4\}"):
        GeneratedFolder(generated.path, {"seed": 4}).verified("data")


def test_a_folder_is_opened_for_writing_and_nothing_is_left_in_it(tmp_path, capsys):
    GeneratedFolder(tmp_path / "new" / "folder", {}).open(quiet=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "folder"]
    assert capsys.readouterr().err == ""


def test_a_folder_that_can_not_be_written_is_told_when_it_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o555)
    with (
        plain_user(),
        pytest.raises(
            DataError,
            match=r"^new: can't be written: Permission denied; data\.root must be a folder where that is allowed",
        ),
    ):
        GeneratedFolder(Path("new"), {}).open(quiet=True)
    tmp_path.chmod(0o755)
    (tmp_path / "new").mkdir(mode=0o555)
    with plain_user(), pytest.raises(DataError, match=r"^new: can't be written: Permission denied"):
        GeneratedFolder(Path("new"), {}).open(quiet=True)


def test_what_can_not_be_seen_is_not_taken_for_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "locked" / "folder").mkdir(parents=True)
    (tmp_path / "locked").chmod(0)
    with plain_user():
        assert exists(Path("locked"))
        assert is_folder(Path("locked"))
        for look in (exists, is_folder, entries):
            with pytest.raises(DataError, match=r"^locked/folder: can't be looked for: Permission denied$"):
                look(Path("locked/folder"))
        with pytest.raises(DataError, match=r"^locked: can't be read: Permission denied$"):
            entries(Path("locked"))
    (tmp_path / "locked").chmod(0o755)


def test_what_is_missing_is_not_there(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "nothing", tmp_path / "file" / "below"):
        assert not exists(path)
        assert not is_folder(path)
        assert entries(path) == []
    assert exists(tmp_path / "file")
    assert not is_folder(tmp_path / "file")
    assert entries(tmp_path) == [tmp_path / "file"]


def test_an_interruption_is_told_and_cleared(generated, capsys):
    generated.open(quiet=False)
    assert capsys.readouterr().err == ""
    (generated.path / "manifest.json").unlink()
    abandoned, recent = generated.path / ".data.1.tmp", generated.path / ".data.2.tmp"
    abandoned.touch()
    recent.touch()
    os.utime(abandoned, (time.time() - 3600,) * 2)
    generated.open(quiet=False)
    assert "an earlier generation was interrupted, starting again" in capsys.readouterr().err
    assert recent.exists()
    assert not abandoned.exists()
