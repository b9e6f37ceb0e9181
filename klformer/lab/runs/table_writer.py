"""Tables that are written some rows at a time, and are there as a whole or not at all: csv, tsv, jsonl, parquet.

csv and tsv are opened with spreadsheets and shown on terminals: a text that begins like a formula has an apostrophe
before it there, and control characters are written out. jsonl and parquet have every text as it is.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError
from klformer.files import replacing
from klformer.lab.terminal import harmless

#: Appends rows with a value for every column.
Write = Callable[[Sequence[Sequence[Any]]], None]


@contextmanager
def writing_table(path: Path, columns: Mapping[str, type]) -> Iterator[Write]:
    """Give a function that writes rows; they take the place of `path` at the end, if there was no error."""
    if path.suffix not in _WRITERS:
        raise ArgumentError(f"--out must end in one of {', '.join(_WRITERS)}, got {str(path)!r}")
    with replacing(path) as temporary, _WRITERS[path.suffix](temporary, columns) as write:
        yield write


@contextmanager
def _delimited(path: Path, columns: Mapping[str, type], *, delimiter: str) -> Iterator[Write]:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(map(_harmless_cell, columns))
        yield lambda rows: writer.writerows(map(_harmless_cell, row) for row in rows)


def _harmless_cell(value: Any) -> Any:
    """Return a value as csv is to have it: no text is a formula, or commands a terminal."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, str):
        return value
    text = harmless(value)
    with suppress(ValueError):
        float(text)  # -1 is a number
        return text
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


@contextmanager
def _json_lines(path: Path, columns: Mapping[str, type]) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:

        def write(rows: Sequence[Sequence[Any]]) -> None:
            lines = (dict(zip(columns, row, strict=True)) for row in rows)
            file.writelines(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)

        yield write


@contextmanager
def _parquet(path: Path, columns: Mapping[str, type]) -> Iterator[Write]:
    # Imported here: it takes half a second, and only parquet needs it.
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    types = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:

        def write(rows: Sequence[Sequence[Any]]) -> None:
            by_column = zip(columns.values(), zip(*rows, strict=True), strict=True)
            cells = [list(map(_text, values)) if kind is str else values for kind, values in by_column]
            arrays = [pyarrow.array(values, field.type) for values, field in zip(cells, schema, strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        yield write


def _text(cell: Any) -> str | None:
    return None if cell is None else str(cell)


_WRITERS: Mapping[str, Callable[[Path, Mapping[str, type]], AbstractContextManager[Write]]] = {
    ".csv": partial(_delimited, delimiter=","),
    ".tsv": partial(_delimited, delimiter="\t"),
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
