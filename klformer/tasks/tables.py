"""Tables with a header: csv, tsv and parquet."""

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path

from klformer.errors import DataError
from klformer.tasks.files import reading

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")


def read_table(path: Path, columns: tuple[str, str]) -> Iterator[tuple[int, str, str]]:
    """The line where a row begins (in parquet: the number of the row, from 1) and the two columns as text, row by row.

    Raises:
        DataError: the file or a column is missing, a column is there twice or not of text, a row has too few or
            too many fields, or the text is not UTF-8.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path, columns)
        return
    with reading(path):
        content = path.read_bytes()
    try:
        # A byte order mark, as spreadsheets write it, is no part of the first column's name.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"is not UTF-8: {error.reason} at byte {error.start}", file=path, line=line) from error
    yield from _read_delimited(path, text, columns)


def _read_delimited(path: Path, text: str, columns: tuple[str, str]) -> Iterator[tuple[int, str, str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    # Documents may be longer than the module's limit of 131,072 characters a field, which is global.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        header = next(reader, None)
        if header is None:
            raise DataError(f"is empty; a header with {columns[0]!r} and {columns[1]!r} must come first", file=path)
        positions = _positions(path, header, columns)
        end = reader.line_num
        for row in reader:
            start, end = end + 1, reader.line_num
            if len(row) != len(header):
                raise DataError(
                    f"a row must have {len(header)} fields, as the header, got {len(row)}", file=path, line=start
                )
            yield start, row[positions[0]], row[positions[1]]
    except csv.Error as error:
        raise DataError(f"can't be parsed: {error}", file=path, line=reader.line_num) from error
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: Path, columns: tuple[str, str]) -> Iterator[tuple[int, str, str]]:
    # Imported here: it takes half a second, and only parquet needs it.
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        with reading(path), parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            positions = _positions(path, names, columns)
            table = file.read(columns=[names[position] for position in positions])
            first, second = (table.column(names[position]).to_pylist() for position in positions)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        # A text that is not UTF-8 is found when it is turned into Python's.
        raise DataError(f"is not a whole parquet file: {error}", file=path) from error
    for row, (text, label) in enumerate(zip(first, second, strict=True), start=1):
        if text is None or label is None:
            raise DataError(f"row {row} has no text or no label", file=path)
        if not isinstance(text, str):
            kind = table.schema.field(columns[0]).type
            raise DataError(f"the column {columns[0]!r} must hold text (string), got {kind}", file=path)
        yield row, text, str(label)


def _positions(path: Path, header: list[str], columns: tuple[str, str]) -> list[int]:
    line, names = None if path.suffix == ".parquet" else 1, ", ".join(header)
    for column in columns:
        count = header.count(column)
        if not count:
            raise DataError(f"has no column {column!r}; its columns are {names}", file=path, line=line)
        if count > 1:
            raise DataError(
                f"must have one column {column!r}, got {count}; its columns are {names}", file=path, line=line
            )
    return [header.index(column) for column in columns]
