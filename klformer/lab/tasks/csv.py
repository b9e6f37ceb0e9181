"""Your own table: csv, tsv, jsonl or parquet, with texts or numbers in one column, or two texts in two, and a label in
another. One file is split by itself; train, validation and test may each be a file of their own."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field

from klformer.errors import DataError
from klformer.lab.tasks.config import DataConfig, Split
from klformer.lab.tasks.files import first_existing, nothing_usable
from klformer.lab.tasks.inputs import InputKind
from klformer.lab.tasks.own import OwnFiles, RowsTask
from klformer.lab.tasks.presets import LAPTOP_OWN_DATA, Preset
from klformer.lab.tasks.tables import TABLE_SUFFIXES, Place, TableFormat, read_table
from klformer.lab.tasks.targets import TargetKind
from klformer.lab.tokens import TokensConfig

#: Names under which a part is looked for in the root.
_STEMS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}

#: Measured on film reviews and on sentences: bytes learn nothing in this time, pieces of words do,
#: and a second layer or a convolution adds nothing.
LAPTOP: Preset = {
    **LAPTOP_OWN_DATA,
    "data": {**LAPTOP_OWN_DATA["data"], "tokens": {"kind": "wordpiece"}},
    "model": {**LAPTOP_OWN_DATA["model"], "num_layers": 1},
    "optimiser": {**LAPTOP_OWN_DATA["optimiser"], "learning_rate": 2e-3},
    "training": {**LAPTOP_OWN_DATA["training"], "max_steps": 600},
}


class CsvData(DataConfig, TableFormat):
    """Where the tables are, and what their columns mean."""

    train: Path | None = None
    """Table to train on: .csv, .tsv, .jsonl or .parquet. Default: train.* in the root."""

    validation: Path | None = None
    """Table to select on. Default: validation.*, valid.*, val.* or dev.* in the root, else a part of train."""

    test: Path | None = None
    """Table to test on. Default: test.* in the root, else another part of train."""

    text_column: str = "text"
    """Column of the inputs: texts, or sequences of numbers."""

    second_column: str | None = None
    """Column of a second text: both are read as one sequence with a separator."""

    label_column: str = "label"
    """Column of the labels."""

    inputs: InputKind = "text"
    """text; integers: a sequence of whole numbers in every row, each a token; floats: a sequence of numbers, or of
    vectors, as of a signal. In csv the numbers are between spaces, commas or semicolons, or a list in JSON."""

    target: TargetKind = "classes"
    """classes: labels are names, of any number of classes. number: a regression."""

    on_missing: Literal["error", "skip", "empty"] = "error"
    """Where a text or a label is missing: stop, leave out the row, or read a missing text as an empty one."""

    tokens: TokensConfig = Field(default_factory=TokensConfig)
    """How texts become sequences."""


class Csv(OwnFiles, RowsTask):
    """Tables of one's own: a row is an example.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from klformer.lab.tasks import TASKS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "reviews.csv"
        ...     _ = file.write_text("text,label\\n" + "well done,good\\nso dull,bad\\n" * 10)
        ...     task = TASKS["csv"](TASKS["csv"].data_config(train=file))
        ...     rows = list(task.labelled("train"))
        ...     new = list(task.unlabelled(file, ["label"]))
        ...     sizes = len(task.load("train")), len(task.load("validation")), len(task.load("test"))
        ...     names = task.class_names()
        >>> sizes, names  # a tenth each is held out
        ((16, 2, 2), ('bad', 'good'))

        What it is made of: rows with a label, and rows of any file with what is kept of them.

        >>> place, cells, label = rows[0]
        >>> place.number, cells, label
        (2, ('well done',), 'good')
        >>> new[1][1:]
        (('so dull',), ('bad',))
        >>> task.kinds()[:2], task.parsed(place, ["very good"])
        (('text', 'classes'), ('very good',))
    """

    name: ClassVar[str] = "csv"
    title: ClassVar[str] = "Table"
    summary: ClassVar[str] = "your own csv, tsv, jsonl or parquet file: texts or numbers, classes or a regression"
    presets: ClassVar[Mapping[str, Preset]] = MappingProxyType({"laptop": LAPTOP})
    data_config: ClassVar[type[DataConfig]] = CsvData
    default_max_len: ClassVar[int] = 512

    config: CsvData

    def location(self) -> str:
        found = {part: self._path(part) for part in _STEMS}
        if found["train"] is None:
            return f"{self.root} (nothing found: {_looked_for()})"
        return ", ".join(str(path) for path in found.values() if path is not None)

    def detail(self) -> str:
        train = self._path("train")
        if train is None:
            return ""
        return train.parent.name if train.stem == "train" else train.stem

    def _has(self, part: Split) -> bool:
        return self._path(part) is not None

    def kinds(self) -> tuple[InputKind, TargetKind, TokensConfig]:
        return self.config.inputs, self.config.target, self.config.tokens

    def labelled(self, part: Split) -> Iterator[tuple[Place, tuple[Any, ...], Any]]:
        path = self._path(part)
        if path is None:
            if self.config.root is None:
                raise DataError(
                    "a table is needed: give --data.train FILE, or --data.root FOLDER with " + _looked_for()
                )
            raise nothing_usable(self.root, (_looked_for(), "--data.train FILE"))
        flags = [*self._flags(), "--data.label-column"]
        for place, fields in self._rows(path, [*self._columns(), self.config.label_column], flags, needed=None):
            yield place, fields[:-1], fields[-1]

    def unlabelled(self, path: Path, keep: Sequence[str]) -> Iterator[tuple[Place, tuple[Any, ...], tuple[Any, ...]]]:
        columns = self._columns()
        flags = [*self._flags(), *(["--keep"] * len(keep))]
        for place, fields in self._rows(_checked(path), [*columns, *keep], flags, needed=len(columns)):
            yield place, fields[: len(columns)], fields[len(columns) :]

    def _rows(
        self, path: Path, columns: Sequence[str], flags: Sequence[str], *, needed: int | None
    ) -> Iterator[tuple[Place, tuple[Any, ...]]]:
        """Yield the rows of a table without those that are to be left out; the first `needed` fields must be there."""
        for place, fields in read_table(path, columns, self.config, flags=flags):
            missing = [name for name, field in zip(columns, fields[:needed], strict=False) if _is_missing(field)]
            if missing:
                if self.config.on_missing == "error":
                    raise place.error(
                        f"the column {missing[0]!r} is empty; --data.on-missing skip leaves such rows out"
                    )
                self._incomplete.setdefault(path, set()).add(place.number)
            if not missing or self.config.on_missing == "empty":
                yield place, fields

    def parsed(self, place: Place, cells: Sequence[Any]) -> Any:
        if self.config.on_missing == "empty" and self.config.inputs == "text" and any(map(_is_missing, cells)):
            return tuple("" if _is_missing(cell) else cell for cell in cells)
        return super().parsed(place, cells)

    def notes(self) -> list[str]:
        """Add how many rows of each file are not complete."""
        done = "left out" if self.config.on_missing == "skip" else "read as empty"
        return super().notes() + [
            f"rows of {path.name} without a text or a label: {len(rows):,}, {done}; the first is in line {min(rows)}"
            for path, rows in self._incomplete.items()
        ]

    def _columns(self) -> list[str]:
        second = self.config.second_column
        if second is not None and self.config.inputs != "text":
            raise DataError("data.second_column is for texts; numbers are in one column")
        return [self.config.text_column] + ([] if second is None else [second])

    def _flags(self) -> list[str]:
        return ["--data.text-column", "--data.second-column"][: len(self._columns())]

    def _path(self, part: Split) -> Path | None:
        given: Path | None = getattr(self.config, part)
        if given is not None:
            return _checked(given.expanduser())
        if self.config.train is not None:
            return None  # whatever is in the root belongs to something else
        names = [f"{stem}{suffix}" for stem in _STEMS[part] for suffix in TABLE_SUFFIXES]
        return first_existing(self.root / name for name in names)


def _is_missing(cell: Any) -> bool:
    """Return whether there is nothing in a field: no text, null, or not a number."""
    return cell is None or cell != cell or (isinstance(cell, str) and not cell.strip())


def _looked_for() -> str:
    return f"train.{{{','.join(suffix[1:] for suffix in TABLE_SUFFIXES)}}}"


def _checked(path: Path) -> Path:
    if path.suffix not in TABLE_SUFFIXES:
        raise DataError(f"a table must be one of {', '.join(TABLE_SUFFIXES)} by its name", file=path)
    return path
