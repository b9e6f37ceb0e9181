"""Tables with named columns: csv, tsv, jsonl and parquet, read row by row, so that they may be larger than memory.

pyarrow reads parquet. Its readers of csv and jsonl do not say in which line a row is wrong, take stray quotes without a
word, need whole fields in a block, and turn texts that look like dates into dates: Python's own read those.
"""

import codecs
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from klformer.config import Config
from klformer.errors import DataError
from klformer.files import parse_json
from klformer.lab.tasks.files import reading

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl")
#: What may separate fields where no delimiter is given.
DELIMITERS = (",", ";", "\t", "|")
#: By the first bytes of a file: what they are, and the encoding that they name.
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
#: Rows of parquet that are in memory at a time.
_ROWS = 4096
# Documents may be longer than the module's limit of 131,072 characters a field.
csv.field_size_limit(sys.maxsize)


class TableFormat(Config):
    """How a table of text is written; parquet says so itself."""

    delimiter: str | None = None
    """csv: what separates fields, one character, or \\t. Default: a tab in .tsv, else the one of , ; tab | that gives
    the columns that are asked for."""

    encoding: str | None = None
    """csv and jsonl: the encoding, such as latin-1 or cp1252. Default: what a byte order mark says, else UTF-8."""

    quoted: bool = True
    """csv: whether a field may be in double quotes, with delimiters and line ends inside."""

    column_names: tuple[str, ...] = ()
    """csv: names for the columns of a file without a header."""


#: A row: where it is, and its fields.
Row = tuple["Place", tuple[Any, ...]]


class Place:
    """Where a row is, for errors: a line of a text, a row of a parquet file.

    Args:
        path: The file.
        number: From 1.
        lines: How many lines of a text the row spans.
    """

    def __init__(self, path: Path, number: int, lines: int = 1) -> None:
        self.path = path
        self.number = number
        self.lines = lines

    def error(self, problem: str) -> DataError:
        """Make an error in this row."""
        if self.path.suffix in (".parquet", ".arrow"):
            return DataError(problem, file=self.path, row=self.number)
        return DataError(problem, file=self.path, line=self.number)


def read_table(
    path: Path,
    columns: Sequence[str],
    table_format: TableFormat | None = None,
    *,
    flags: Sequence[str] = (),
    cut: list[int] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a table: where each begins and the fields of the columns, text in csv, any value elsewhere.

    Args:
        columns: Their names.
        table_format: How the table is written; found out if it is not said.
        flags: For each column the flag that names another one, for errors.
        cut: Takes the lines of csv that have too few fields for the columns, which are left out; if it is not given,
            a row must have as many fields as the header.
    """
    chosen = table_format or TableFormat()
    wanted = _Columns(path, tuple(columns), tuple(flags))
    if path.suffix in (".parquet", ".arrow"):
        yield from _read_arrow(path, wanted)
        return
    with _text(path, chosen) as file:
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path, file, wanted)
        else:
            yield from _read_delimited(path, file, wanted, chosen, cut)


class _Columns:
    """The columns that somebody wants of a file."""

    def __init__(self, path: Path, names: tuple[str, ...], flags: tuple[str, ...]) -> None:
        self.path = path
        self.names = names
        self._flags = dict(zip(names, flags, strict=False))

    def positions(self, header: Sequence[str], *, line: int | None = None, hint: str = "") -> list[int]:
        """Return where they are in a header."""
        for name in self.names:
            count = list(header).count(name)
            if count == 1:
                continue
            flag = self._flags.get(name)
            other = f"; {flag} names another" if flag else ""
            problem = f"has no column {name!r}" if not count else f"must have one column {name!r}, got {count}"
            raise DataError(f"{problem}; its columns are {', '.join(header)}{other}{hint}", file=self.path, line=line)
        return [list(header).index(name) for name in self.names]


@contextmanager
def _text(path: Path, chosen: TableFormat) -> Iterator[TextIO]:
    """Open the file as text, after a byte order mark, which is no part of the first column's name in any encoding."""
    with reading(path), path.open("rb") as file:
        start = file.read(4)
        mark, named = next(((mark, name) for mark, name in _MARKS if start.startswith(mark)), (b"", "utf-8"))
        file.seek(len(mark))
        encoding = chosen.encoding or named
        try:
            codecs.lookup(encoding)
        except LookupError as error:
            raise DataError(
                f"data.encoding must be one that Python knows, such as utf-8 or latin-1, got {encoding!r}"
            ) from error
        try:
            # Without quotes a lone carriage return is a character as any other.
            yield io.TextIOWrapper(file, encoding=encoding, newline="" if chosen.quoted else "\n")
        except UnicodeError as error:
            raise _not_decodable(path, len(mark), encoding) from error


def _not_decodable(path: Path, start: int, encoding: str) -> DataError:
    remedy = "give its encoding: --data.encoding latin-1, cp1252 or another"
    name = encoding.upper()
    if not encoding.startswith("utf-16"):
        with path.open("rb") as file:
            file.seek(start)
            for number, line in enumerate(file, start=1):
                try:
                    line.decode(encoding)
                except UnicodeDecodeError as error:
                    problem = f"is not {name}: {error.reason} at byte {error.start} of the line; {remedy}"
                    return DataError(problem, file=path, line=number)
                except UnicodeError:
                    break
    return DataError(f"is not {name}; {remedy}", file=path)


def _read_delimited(
    path: Path, file: TextIO, wanted: _Columns, chosen: TableFormat, cut: list[int] | None
) -> Iterator[Row]:
    delimiter = _delimiter(path, wanted, chosen)
    rows = (_quoted_rows if chosen.quoted else _plain_rows)(path, file, delimiter)
    # A line without anything in it is no row.
    header = list(chosen.column_names) or next((row for _, row in rows), [])
    if not header:
        names = " and ".join(map(repr, wanted.names))
        raise DataError(f"is empty; a header with {names} must come first", file=path)
    hint = f"; with --data.delimiter another one than {delimiter!r} separates them" if len(header) == 1 else ""
    positions = wanted.positions(header, line=1, hint=hint)
    for place, row in rows:
        if cut is not None and len(row) <= max(positions):
            cut.append(place.number)
            continue
        if cut is None and len(row) != len(header):
            given = "--data.column-names" if chosen.column_names else "the header"
            problem = f"a row must have {len(header)} fields, as {given}, got {len(row)}"
            if chosen.quoted:
                problem += f"; a field with {delimiter!r} in it must be in quotes (--data.delimiter names another, "
                problem += "--data.no-quoted takes quotes as text)"
            raise place.error(problem)
        yield place, tuple(row[position] for position in positions)


def _plain_rows(path: Path, file: TextIO, delimiter: str) -> Iterator[tuple["Place", list[str]]]:
    for number, line in enumerate(file, start=1):
        if fields := line.rstrip("\r\n"):
            yield Place(path, number), fields.split(delimiter)


def _quoted_rows(path: Path, file: TextIO, delimiter: str) -> Iterator[tuple["Place", list[str]]]:
    reader, end = csv.reader(file, delimiter=delimiter, strict=True), 0
    try:
        for row in reader:
            start, end = end + 1, reader.line_num
            if row:
                yield Place(path, start, end - start + 1), row
    except csv.Error as error:
        problem = f"can't be parsed: {error}"
        if reader.line_num > end + 1:
            problem = f"a quote that opens in this row is not closed properly up to line {reader.line_num} ({error})"
        raise DataError(f"{problem}; --data.no-quoted takes quotes as text", file=path, line=end + 1) from error


def _delimiter(path: Path, wanted: _Columns, chosen: TableFormat) -> str:
    """Return what separates the fields."""
    if chosen.delimiter is not None:
        delimiter = "\t" if chosen.delimiter in ("\\t", "tab") else chosen.delimiter
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise DataError(f"data.delimiter must be one character, or \\t for a tab, got {chosen.delimiter!r}")
        return delimiter
    if path.suffix == ".tsv":
        return "\t"
    with _text(path, chosen) as file:
        # A file without line ends must not be read as a whole.
        lines = [file.readline(1 << 20) for _ in range(20)]

    def fits(delimiter: str) -> tuple[bool, int, int]:
        """Return whether the columns are in the header, how many lines have as many fields, and how many these are."""
        fields = [row for line in lines for row in csv.reader([line], delimiter=delimiter)]
        header = list(chosen.column_names) or (fields[0] if fields else [])
        return set(wanted.names) <= set(header), sum(len(row) == len(header) for row in fields), len(header)

    return max(DELIMITERS, key=fits)


def _read_jsonl(path: Path, file: TextIO, wanted: _Columns) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            content = parse_json(line)
        except ValueError as error:
            raise DataError(f"is not JSON: {error}; a line must be one object", file=path, line=number) from error
        if not isinstance(content, dict):
            raise DataError(f"a line must be one object, got a {type(content).__name__}", file=path, line=number)
        wanted.positions(list(content), line=number)
        yield Place(path, number), tuple(content[name] for name in wanted.names)


def _read_arrow(path: Path, wanted: _Columns) -> Iterator[Row]:
    """Yield the rows of a parquet file, or of one that `datasets` has written."""
    # Imported here: it takes half a second, and only these files need it.
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import ipc, parquet

    number, names = 0, list(wanted.names)
    try:
        with reading(path), ExitStack() as until_end:
            if path.suffix == ".parquet":
                file = until_end.enter_context(parquet.ParquetFile(path))
                wanted.positions(file.schema_arrow.names)
                batches = file.iter_batches(batch_size=_ROWS, columns=names)
            else:
                source = until_end.enter_context(pyarrow.memory_map(str(path)))
                try:
                    table = ipc.open_stream(source).read_all()
                except pyarrow.ArrowInvalid:
                    table = ipc.open_file(source).read_all()
                wanted.positions(table.column_names)
                batches = table.select(names).to_batches(max_chunksize=_ROWS)
            for batch in batches:
                columns = [batch.column(name).to_pylist() for name in names]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield Place(path, number), values
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        # A text that is not UTF-8 is found when it is turned into Python's.
        raise DataError(f"is not a whole {path.suffix[1:]} file: {error}", file=path) from error
