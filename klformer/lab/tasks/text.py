"""Text of Long Range Arena: the sentiment of a film review (IMDB) from its bytes, up to 4,000 of them; id = byte +
1."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from klformer.errors import DataError
from klformer.lab.data.sequences import ByteRows, Examples
from klformer.lab.tasks.base import InputChunk, Task
from klformer.lab.tasks.config import DataConfig, Split
from klformer.lab.tasks.files import Source, entries, exists, first_existing, hub_or_nothing, is_folder, reading
from klformer.lab.tasks.inputs import chunks_of_rows, rows_of_texts
from klformer.lab.tasks.presets import PAPER_OPTIMISER, Preset, lra_presets, paper_attention
from klformer.lab.tasks.tables import TABLE_SUFFIXES, Place, read_table

_HUB_NAME = "stanfordnlp/imdb"
_LABELS = ("neg", "pos")
_LOOKED_FOR = ("aclImdb/{train,test}/{neg,pos}/*.txt", "{train,test}.{csv,tsv,parquet,jsonl}")
#: Labels in tables: numbers, or words as the copies of this data set in circulation have them.
_LABEL_NAMES = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "neg": 0, "pos": 1, "negative": 0, "positive": 1}


class TextData(DataConfig):
    """Where the reviews are, and the columns of tables."""

    text_column: str = "text"
    """From a csv, tsv, jsonl or parquet file: the column of the text."""

    label_column: str = "label"
    """From a csv, tsv, jsonl or parquet file: the column of the label."""


PRESETS = lra_presets(
    paper={
        "model": {
            "num_layers": 4, "num_heads": 4, "model_dim": 256, "head_dim": 64, "ffn_dim": 1024, "head_hidden_dim": 1024,
            "dropout": 0.1, "positions": "sinusoidal",
        },
        "optimiser": {**PAPER_OPTIMISER, "learning_rate": 5e-2},
        "schedule": {"kind": "rsqrt", "warmup_steps": 8000},
        "training": {"batch_size": 32, "max_steps": 20_000},
        "attention": {
            # Long Range Arena's rank for this task is not Linformer's usual one.
            "linformer": {"rank": 32},
            **paper_attention(
                gmm_rks=128, fastfood_rks=64, generative_rks=256, gmm_prf=256, fastfood_prf=64, generative_prf=128,
            ),
        },
    },
    laptop={
        # One layer and no dropout: what a byte says of a review is little, and deeper models take longer to find it.
        # The mean of all positions: with CLS alone softmax does not learn in this time. The convolution tells a byte
        # its neighbours: without it no attention is above what the counts of bytes give.
        "data": {"max_len": 512, "validation_limit": 1_000, "test_limit": 2_000},
        "model": {"positions": "learned"},
        "training": {"batch_size": 32, "max_steps": 500, "evaluate_every": 250, "checkpoint_every": 250},
    },
    workstation={
        "optimiser": {"learning_rate": 4e-3},
        "training": {"batch_size": 16, "max_steps": 4_000, "evaluate_every": 400},
    },
)  # fmt: skip


class Text(Task):
    """IMDB reviews, two classes.

    Read from the tree `aclImdb` (in the root, or the root itself), else from tables in the root; where no root is
    given, else from the hub. There is no official validation set: "lra" validates on test, "holdout" on a part of
    train. A `validation` table is used by both.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from klformer.lab.tasks import TASKS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for part in ("train", "test"):
        ...         file = Path(folder) / f"{part}.csv"
        ...         _ = file.write_text("text,label\\n" + "well done,pos\\nso dull,neg\\n" * 10)
        ...     task = TASKS["text"](TASKS["text"].data_config(root=folder, protocol="lra"))
        ...     test = task.load("test")
        >>> task.class_names(), len(test), test.first[1].tolist()  # id = byte + 1
        (('neg', 'pos'), 20, [116, 112, 33, 101, 118, 109, 109])
    """

    name: ClassVar[str] = "text"
    title: ClassVar[str] = "Text"
    summary: ClassVar[str] = "sentiment of film reviews (IMDB) from up to 4,000 bytes"
    num_classes: int = 2
    chance: ClassVar[float | None] = 0.5
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    vocab_size: int | None = 257
    default_max_len: ClassVar[int] = 4_000
    data_config: ClassVar[type[DataConfig]] = TextData
    official_sizes = MappingProxyType({"train": 25_000, "test": 25_000})

    config: TextData

    def location(self) -> str:
        return self._source().where

    def validation_source(self) -> Literal["file", "train", "test"]:
        return "file" if self._source().has_validation else super().validation_source()

    def is_official(self) -> bool:
        return self._source().is_official

    def _source(self) -> Source:
        for folder in (self.root / "aclImdb", self.root):
            if any(is_folder(folder / part / name) for part in ("train", "test") for name in _LABELS):
                return Source(str(folder), lambda part, folder=folder: self._read_tree(folder / part))  # type: ignore[misc]
        tables = {part: self._table(part) for part in get_args(Split)}
        if exists(tables["train"]) or exists(tables["test"]):
            return Source(
                f"{tables['train']} and {tables['test'].name}",
                lambda part: self._read_table(tables[part]),
                has_validation=exists(tables["validation"]),
                is_official=False,
            )
        return hub_or_nothing(self.config, _HUB_NAME, _LOOKED_FOR, self._of_hub)

    def _of_hub(self, rows: Any) -> Examples:
        return self._examples(map(str.encode, rows["text"]), rows["label"])

    def _table(self, part: Split) -> Path:
        """Return the table of a part; where there is none, the one that is missing."""
        paths = [self.root / f"{part}{suffix}" for suffix in TABLE_SUFFIXES]
        return first_existing(paths) or paths[0]

    def _examples(self, texts: Iterable[bytes], labels: Sequence[int]) -> Examples:
        rows = ByteRows.of(text[: self.max_len] for text in texts)
        return Examples(rows.plus_one(), np.asarray(labels, np.int64))

    def _read_tree(self, folder: Path) -> Examples:
        """Read the official tree: `{train,test}/{neg,pos}/ID_RATING.txt`."""
        texts, labels = [], []
        for label, name in enumerate(_LABELS):
            for path in _reviews(folder / name):
                with reading(path), path.open("rb") as file:
                    texts.append(file.read(self.max_len))
                if not texts[-1]:
                    raise DataError("the review is empty", file=path)
                labels.append(label)
        return self._examples(texts, labels)

    def _read_table(self, path: Path) -> Examples:
        """Read a csv, tsv, jsonl or parquet file with a column of text and one of labels."""
        columns = (self.config.text_column, self.config.label_column)
        texts, labels = [], []
        for place, (text, label) in read_table(path, columns, flags=("--data.text-column", "--data.label-column")):
            word = str(label).lower()
            if word not in _LABEL_NAMES:
                raise place.error(f"the label must be 0 or 1 (or neg or pos), got {label!r}")
            if not isinstance(text, str):
                raise place.error(f"the column {columns[0]!r} must hold text, got {text!r}")
            if not text:
                raise place.error("the text is empty")
            texts.append(text.encode()[: self.max_len])
            labels.append(_LABEL_NAMES[word])
        if not labels:
            raise DataError("has no rows", file=path)
        return self._examples(texts, labels)

    def read(self, part: Split) -> Examples:
        return self._source().read(part)

    def class_names(self) -> tuple[str, ...]:
        return _LABELS

    def read_inputs(self, path: Path, *, keep: Sequence[str], chunk: int) -> Iterator[InputChunk]:
        def parse(place: Place, text: str) -> bytes:
            if not text:
                raise place.error("the text is empty")
            return text.encode()[: self.max_len]

        rows = rows_of_texts(path, [self.config.text_column], keep, parse, flags=["--data.text-column"])
        return chunks_of_rows(rows, chunk, lambda cells: ByteRows.of(text for (text,) in cells).plus_one())


def _reviews(folder: Path) -> list[Path]:
    """Return the reviews of a folder by their number."""
    if not is_folder(folder):
        raise DataError("the folder of reviews is missing", file=folder)
    numbered = []
    for path in entries(folder):
        if path.suffix != ".txt":
            continue
        match = re.fullmatch(r"(\d+)_\d+", path.stem)
        if match is None:
            raise DataError("a review must be named ID_RATING.txt", file=path)
        numbered.append((int(match[1]), path))
    if not numbered:
        raise DataError("has no reviews (*.txt)", file=folder)
    numbered.sort()
    for expected, (number, path) in enumerate(numbered):
        if number < expected:
            twice = f"{numbered[expected - 1][1].name} and {path.name}"
            raise DataError(
                f"review {number} is there twice, {twice}; unpack the archive into an empty folder", file=folder
            )
        if number > expected:
            raise DataError(
                f"review {expected} is missing, {path.name} comes instead; unpack the archive again", file=folder
            )
    return [path for _, path in numbered]
