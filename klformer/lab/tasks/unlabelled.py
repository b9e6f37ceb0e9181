"""Rows and images without labels, some at a time: what `klformer predict` reads, whatever the task is."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from klformer.errors import ArgumentError, DataError
from klformer.lab.data import Sequences
from klformer.lab.data.sequences import AnyArray
from klformer.lab.tasks.base import InputChunk
from klformer.lab.tasks.files import entries, is_folder
from klformer.lab.tasks.tables import TABLE_SUFFIXES, Place, read_table

#: A row: where it is, what the task makes of its cells, and the fields that are passed on.
ParsedRow = tuple[Place, Any, tuple[Any, ...]]


def chunks_of_rows(
    rows: Iterable[ParsedRow], size: int, encode: Callable[[list[Any]], Sequences | tuple[Sequences, Sequences]]
) -> Iterator[InputChunk]:
    """So many rows at a time, as the sequences, or the two sides of pairs, that `encode` makes of them."""
    numbers: list[int] = []
    cells: list[Any] = []
    kept: list[tuple[Any, ...]] = []
    for place, parsed, fields in rows:
        numbers.append(place.number)
        cells.append(parsed)
        kept.append(fields)
        if len(numbers) == size:
            yield _chunk(numbers, encode(cells), kept)
            numbers, cells, kept = [], [], []
    if numbers:
        yield _chunk(numbers, encode(cells), kept)


def _chunk(
    numbers: list[int], found: Sequences | tuple[Sequences, Sequences], kept: list[tuple[Any, ...]]
) -> InputChunk:
    if isinstance(found, Sequences):
        return InputChunk(numbers, found, kept)
    return InputChunk(numbers, found[0], kept, second=found[1])


def rows_of_texts(
    path: Path,
    columns: Sequence[str],
    keep: Sequence[str],
    parse: Callable[[Place, str], bytes],
    *,
    flags: Sequence[str] = (),
) -> Iterator[ParsedRow]:
    """The rows of a table with columns of text, each cell as the bytes that `parse` makes of it.

    Args:
        columns: Their names.
        keep: Columns that are passed on.
        flags: For each column the flag that names another one, for errors.
    """
    if path.suffix not in TABLE_SUFFIXES:
        names = " and ".join(map(repr, columns))
        raise DataError(f"must be a table ({', '.join(TABLE_SUFFIXES)}) with the column {names}", file=path)
    others = [*(flags or [""] * len(columns)), *["--keep"] * len(keep)]
    for place, fields in read_table(path, [*columns, *keep], flags=others):
        for name, text in zip(columns, fields, strict=False):
            if not isinstance(text, str):
                raise place.error(f"the column {name!r} must hold text, got {text!r}")
        yield place, [parse(place, text) for text in fields[: len(columns)]], fields[len(columns) :]


def chunks_of_images(
    path: Path, keep: Sequence[str], size: int, suffixes: Sequence[str], read: Callable[[Path], AnyArray]
) -> Iterator[InputChunk]:
    """An image, or all in a folder and below it, so many at a time, each as the sequence that `read` gives."""
    if keep:
        raise ArgumentError(f"images have no columns to keep, got --keep {' '.join(keep)}")
    paths = sorted(_below(path, suffixes)) if is_folder(path) else [path]
    if not paths:
        raise DataError(f"has no images ({', '.join(suffix.lstrip('.') for suffix in suffixes)})", file=path)
    for start in range(0, len(paths), size):
        some = paths[start : start + size]
        rows = np.stack([read(one) for one in some])
        yield InputChunk([str(one) for one in some], Sequences.from_matrix(rows), [()] * len(some))


def _below(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    """The images in a folder and below it."""
    for path in entries(folder):
        if is_folder(path):
            yield from _below(path, suffixes)
        elif path.suffix.lower() in suffixes:
            yield path
