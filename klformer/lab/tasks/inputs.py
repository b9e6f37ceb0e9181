"""How the cells of somebody's own table become sequences: texts by tokens, whole numbers as they are, other numbers
scaled. What that takes is learned from the training rows, and remembered as JSON."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from klformer.errors import ArgumentError, DataError, RunError
from klformer.files import parse_json
from klformer.lab.data import InputShape, Sequences
from klformer.lab.data.sequences import AnyArray
from klformer.lab.tasks.base import InputChunk
from klformer.lab.tasks.files import entries, is_folder
from klformer.lab.tasks.tables import TABLE_SUFFIXES, Place, read_table
from klformer.lab.tokens import Tokens, TokensConfig, make_tokens, tokens_from_json

#: A row: where it is, what the task makes of its cells, and the fields that are passed on.
ParsedRow = tuple[Place, Any, tuple[Any, ...]]


def chunks_of_rows(
    rows: Iterable[ParsedRow], size: int, encode: Callable[[list[Any]], Sequences | tuple[Sequences, Sequences]]
) -> Iterator[InputChunk]:
    """Yield so many rows at a time, as the sequences, or the two sides of pairs, that `encode` makes of them."""
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
    """Yield the rows of a table with columns of text, each cell as the bytes that `parse` makes of it."""
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
    """Yield an image, or all in a folder and below it, so many at a time, each as the sequence that `read` gives."""
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
    """Yield the images in a folder and below it."""
    for path in entries(folder):
        if is_folder(path):
            yield from _below(path, suffixes)
        elif path.suffix.lower() in suffixes:
            yield path


InputKind = Literal["text", "integers", "floats"]
#: More different whole numbers than this are a measurement, not a vocabulary.
MOST_INTEGERS = 65_535
#: The largest whole number that a float holds with all below it.
MOST = 2**53


class Inputs(ABC):
    """From the cells of rows to sequences. `parse` raises ValueError with what is wrong with a row."""

    kind: ClassVar[str]

    @staticmethod
    @abstractmethod
    def parse(cells: Sequence[Any]) -> Any:
        """Return what `encode` takes of a row: a tuple of texts, or an array."""

    @abstractmethod
    def shape(self, max_len: int) -> InputShape:
        """Return the form of the sequences."""

    @abstractmethod
    def encode(self, rows: Sequence[Any], max_len: int) -> Sequences:
        """Encode parsed rows as sequences, cut at max_len."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return all that `inputs_from_json` needs."""


class TextInputs(Inputs):
    """One text, or two with a separator between them."""

    kind: ClassVar[str] = "text"

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    @staticmethod
    def parse(cells: Sequence[Any]) -> tuple[str, ...]:
        for cell in cells:
            if not isinstance(cell, str):
                raise ValueError(f"must hold text, got {cell!r}; --data.inputs reads numbers")
            if not cell.strip():
                raise ValueError("the text is empty")
        return tuple(cells)

    def shape(self, max_len: int) -> InputShape:
        tokens = self.tokens
        return InputShape(
            max_len=max_len,
            vocab_size=tokens.vocab_size,
            separator=tokens.separator,
            mask=tokens.mask,
            specials=tokens.specials,
        )

    def encode(self, rows: Sequence[tuple[str, ...]], max_len: int) -> Sequences:
        if rows and len(rows[0]) == 2:
            return Sequences.from_list(self.tokens.encode_pairs([(row[0], row[1]) for row in rows], max_len))
        return Sequences.from_list(self.tokens.encode_within([row[0] for row in rows], max_len))

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokens": self.tokens.as_json()}


class IntegerInputs(Inputs):
    """Whole numbers as tokens: the n-th of those in the training rows has the id n, any other 0."""

    kind: ClassVar[str] = "integers"

    def __init__(self, values: Sequence[int]) -> None:
        self.values = np.asarray(values, np.int64)

    @staticmethod
    def parse(cells: Sequence[Any]) -> AnyArray:
        numbers = _numbers(cells[0])
        if numbers.ndim != 1 or (numbers != np.round(numbers)).any() or (abs(numbers) > MOST).any():
            raise ValueError("must hold whole numbers below 2^53; --data.inputs floats reads others")
        return numbers.astype(np.int64)

    def shape(self, max_len: int) -> InputShape:
        return InputShape(max_len=max_len, vocab_size=len(self.values) + 1)

    def encode(self, rows: Sequence[AnyArray], max_len: int) -> Sequences:
        return Sequences.from_list([self._ids(row[:max_len]) for row in rows])

    def _ids(self, row: AnyArray) -> AnyArray:
        places = np.minimum(np.searchsorted(self.values, row), len(self.values) - 1)
        return np.where(self.values[places] == row, places + 1, 0)

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "values": self.values.tolist()}


class FloatInputs(Inputs):
    """Numbers, or vectors of them, as measured: less their mean and over their deviation in the training rows."""

    kind: ClassVar[str] = "floats"

    def __init__(self, mean: Sequence[float], scale: Sequence[float]) -> None:
        self.mean, self.scale = np.asarray(mean), np.asarray(scale)

    @staticmethod
    def parse(cells: Sequence[Any]) -> AnyArray:
        numbers = _numbers(cells[0])
        return numbers[:, None] if numbers.ndim == 1 else numbers

    def shape(self, max_len: int) -> InputShape:
        return InputShape(max_len=max_len, input_dim=len(self.mean))

    def encode(self, rows: Sequence[AnyArray], max_len: int) -> Sequences:
        return Sequences.from_list([(row[:max_len] - self.mean) / self.scale for row in rows])

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "mean": self.mean.tolist(), "scale": self.scale.tolist()}


#: By the name of the option.
KINDS: Mapping[str, type[Inputs]] = {kind.kind: kind for kind in (TextInputs, IntegerInputs, FloatInputs)}


def learn_inputs(kind: InputKind, rows: Sequence[Any], tokens: TokensConfig) -> Inputs:
    """Learn from the training rows, as parsed, how to read all others."""
    if kind == "text":
        return TextInputs(make_tokens(tokens, (text for row in rows for text in row)))
    if kind == "integers":
        values = np.unique(np.concatenate(rows))
        if len(values) > MOST_INTEGERS:
            raise ValueError(
                f"has {len(values):,} different whole numbers, which are too many for tokens; give --data.inputs floats"
            )
        return IntegerInputs(values.tolist())
    widths = {row.shape[1] for row in rows}
    if len(widths) > 1:
        raise ValueError(f"must have vectors of one size in all rows, got {', '.join(map(str, sorted(widths)))}")
    everything = np.concatenate(rows)
    scale = everything.std(0)
    return FloatInputs(everything.mean(0).tolist(), np.where(scale > 0, scale, 1.0).tolist())


def inputs_from_json(content: Mapping[str, Any]) -> Inputs:
    """Make the inputs that `as_json` describes."""
    try:
        kind = content["kind"]
        if kind == "text":
            return TextInputs(tokens_from_json(content["tokens"]))
        return (
            IntegerInputs(content["values"]) if kind == "integers" else FloatInputs(content["mean"], content["scale"])
        )
    except (KeyError, TypeError) as error:
        raise RunError(f"what the run remembers of its inputs is damaged: {error}") from error


def _numbers(cell: Any) -> AnyArray:
    """Parse the numbers of a cell: a list, a list in JSON, or numbers between spaces, commas or semicolons."""
    if isinstance(cell, str):
        text = cell.strip()
        cell = parse_json(text) if text.startswith("[") else text.replace(",", " ").replace(";", " ").split()
    elif isinstance(cell, int | float):
        cell = [cell]
    try:
        numbers = np.asarray(cell, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"must hold numbers: {error}") from error
    if numbers.ndim not in (1, 2) or numbers.size == 0:
        raise ValueError(f"must hold a sequence of numbers, got {cell!r}")
    if not np.isfinite(numbers).all():
        raise ValueError("must hold finite numbers; leave out what is missing, or fill it in")
    return numbers
