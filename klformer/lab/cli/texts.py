"""Texts to convert a model with: lines of text files, or a column of csv, tsv, parquet or Arrow files; or folders."""

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from klformer.checks import suggestion
from klformer.errors import DataError, check_extra

TABLES = (".csv", ".tsv", ".parquet", ".arrow")


def read_texts(path: Path, column: str) -> Iterator[str]:
    """The texts of a file, or of all files in a folder, one after the other; empty ones are left out.

    Of a text file every line is a text; of a folder with text files only, every file is.

    Raises:
        DataError: there is nothing, or a file can't be read.
    """
    if not path.exists():
        raise DataError("there is no such file or folder", file=path)
    if path.is_file():
        yield from _of_file(path, column, whole=False)
        return
    files = sorted(each for each in path.rglob("*") if each.is_file() and each.suffix in (*TABLES, ".txt"))
    if not files:
        raise DataError(f"has no files that end in .txt, {', '.join(TABLES)}", file=path)
    whole = all(each.suffix == ".txt" for each in files)
    for each in files:
        yield from _of_file(each, column, whole=whole)


def _of_file(path: Path, column: str, *, whole: bool) -> Iterator[str]:
    try:
        if path.suffix in (".csv", ".tsv"):
            texts = _of_delimited(path, column)
        elif path.suffix in (".parquet", ".arrow"):
            texts = _of_arrow(path, column)
        else:
            content = path.read_text(encoding="utf-8")
            texts = iter([content] if whole else content.split("\n"))  # other separators may stand inside a text
        yield from (text.strip() for text in texts if text.strip())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"can't be read: {error}", file=path) from error


def _of_delimited(path: Path, column: str) -> Iterator[str]:
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            _check_column(path, column, rows.fieldnames or [])
            for row in rows:
                yield row[column] or ""
    finally:
        csv.field_size_limit(limit)


def _of_arrow(path: Path, column: str) -> Iterator[str]:
    check_extra("lab", f"reading {path.name}", ["pyarrow"])
    # Imported here: it takes half a second, and only these files need it.
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import ipc, parquet

    try:
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            with pyarrow.memory_map(str(path)) as source:
                try:
                    table = ipc.open_stream(source).read_all()  # as datasets writes it
                except pyarrow.ArrowInvalid:
                    table = ipc.open_file(source).read_all()
    except pyarrow.ArrowException as error:
        raise DataError(f"can't be read: {error}", file=path) from error
    _check_column(path, column, table.column_names)
    for value in table.column(column).to_pylist():
        yield str(value or "")


def _check_column(path: Path, column: str, there: Sequence[str]) -> None:
    if column not in there:
        names = ", ".join(map(repr, there)) or "none"
        hint = suggestion(column, there)
        raise DataError(f"has no column {column!r}; its columns are {names}; --column names one{hint}", file=path)
