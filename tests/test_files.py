"""Files are written as a whole or not at all."""

import errno
import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from klformer.errors import FileError
from klformer.files import replacing, write_text


def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "deep" / "file"
    write_text(path, "old")
    interrupted = replacing(path)
    interrupted.__enter__().write_text("half of the new")
    assert not interrupted.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_is_named(tmp_path):
    full = pytest.raises(FileError, match=r"can't write .*/file: the disk is full")
    with full, replacing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FileError, match=r"can't write .*: (Not a directory|File exists)"):
        write_text(tmp_path / "taken" / "file", "text")


def test_the_mode_is_that_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_weights_are_as_readable_as_other_files(tmp_path):
    with replacing(tmp_path / "weights") as temporary:
        save_file({"x": torch.zeros(1)}, temporary)
    (tmp_path / "other").touch()
    assert (tmp_path / "weights").stat().st_mode == (tmp_path / "other").stat().st_mode
