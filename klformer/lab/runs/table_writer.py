"""Tables that are written some rows at a time, and are there as a whole or not at all: csv, tsv, jsonl, parquet.

csv and tsv are opened with spreadsheets and shown on terminals: a text that begins like a formula has an apostrophe
before it there, and control characters are written out. jsonl and parquet have every text as it is.
"""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError
from klformer.files import replacing
from klformer.lab.terminal import harmless

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")


class TableWriter(ABC):
    """Writes rows of values.

    Args:
        path: The file.
        columns: Names, and what their values are: int, float or str.
    """

    def __init__(self, path: Path, columns: Mapping[str, type]) -> None:
        self.path = path
        self.columns = dict(columns)

    @abstractmethod
    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append rows, with a value for every column."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


def _cell(value: Any) -> Any:
    """A value as csv is to have it: no text is a formula, or commands a terminal."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, str):
        return value
    text = harmless(value)
    with suppress(ValueError):
        float(text)  # -1 is a number
        return text
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


class _Delimited(TableWriter):
    delimiter = ","

    def __init__(self, path: Path, columns: Mapping[str, type]) -> None:
        super().__init__(path, columns)
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, delimiter=self.delimiter, lineterminator="\n")
        self._writer.writerow(map(_cell, self.columns))

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        for row in rows:
            self._writer.writerow(map(_cell, row))

    def close(self) -> None:
        self._file.close()


class _Tabbed(_Delimited):
    delimiter = "\t"


class _JsonLines(TableWriter):
    def __init__(self, path: Path, columns: Mapping[str, type]) -> None:
        super().__init__(path, columns)
        self._file = path.open("w", encoding="utf-8")

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        for row in rows:
            line = dict(zip(self.columns, row, strict=True))
            self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def close(self) -> None:
        self._file.close()


class _Parquet(TableWriter):
    def __init__(self, path: Path, columns: Mapping[str, type]) -> None:
        # Imported here: it takes half a second, and only parquet needs it.
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet

        super().__init__(path, columns)
        self._arrow = pyarrow
        types = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
        self._schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
        self._writer = parquet.ParquetWriter(path, self._schema)

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        arrays = []
        for field, kind, values in zip(self._schema, self.columns.values(), zip(*rows, strict=True), strict=True):
            cells = [None if value is None else str(value) for value in values] if kind is str else list(values)
            arrays.append(self._arrow.array(cells, field.type))
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


_WRITERS: Mapping[str, type[TableWriter]] = dict(
    zip(SUFFIXES, (_Delimited, _Tabbed, _JsonLines, _Parquet), strict=True)
)


@contextmanager
def writing_table(path: Path, columns: Mapping[str, type]) -> Iterator[TableWriter]:
    """A writer; what it wrote takes the place of `path` at the end, if there was no error."""
    if path.suffix not in _WRITERS:
        raise ArgumentError(f"--out must end in one of {', '.join(SUFFIXES)}, got {str(path)!r}")
    with replacing(path) as temporary:
        writer = _WRITERS[path.suffix](temporary, columns)
        try:
            yield writer
        finally:
            writer.close()
