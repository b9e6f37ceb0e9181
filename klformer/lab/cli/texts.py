"""Texts to convert a model with: lines of text files, or a column of tables or Arrow files; or folders of these."""

from collections.abc import Iterator
from pathlib import Path

from klformer.errors import DataError
from klformer.lab.tasks.files import reading
from klformer.lab.tasks.tables import TABLE_SUFFIXES, read_table

SUFFIXES = (*TABLE_SUFFIXES, ".arrow")


def read_texts(path: Path, column: str) -> Iterator[str]:
    """Yield the texts of a file, or of all files in a folder, one after the other; empty ones are left out.

    Of a text file every line is a text; of a folder with text files only, every file is.

    Raises:
        DataError: there is nothing, or a file can't be read.
    """
    if not path.exists():
        raise DataError("there is no such file or folder", file=path)
    files = sorted(each for each in path.rglob("*") if each.is_file() and each.suffix in (*SUFFIXES, ".txt"))
    if path.is_dir() and not files:
        raise DataError(f"has no files that end in .txt, {', '.join(SUFFIXES)}", file=path)
    whole = path.is_dir() and all(each.suffix == ".txt" for each in files)
    for each in files if path.is_dir() else [path]:
        yield from (text.strip() for text in _texts_of(each, column, whole=whole) if text.strip())


def _texts_of(path: Path, column: str, *, whole: bool) -> Iterator[str]:
    if path.suffix in SUFFIXES:
        for _, (text,) in read_table(path, [column], flags=["--column"]):
            yield str(text or "")
        return
    try:
        with reading(path):
            content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"can't be read: {error}", file=path) from error
    yield from [content] if whole else content.split("\n")  # other separators may stand inside a text
