"""Texts without labels, for pretraining: WikiText in its own files, any text file, or a folder of them.

Lines are tokenised one after the other, and the stream of tokens is cut into blocks of max_len. It is tokenised once:
the ids are kept in the cache folder under a fingerprint of the texts and the tokens, and mapped into memory from there.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from klformer.errors import ArgumentError, DataError
from klformer.files import sha256
from klformer.lab.data import Examples, InputShape, Sequences
from klformer.lab.data.sequences import AnyArray
from klformer.lab.data.token_store import TokenStore
from klformer.lab.tasks.base import Knowledge
from klformer.lab.tasks.config import DataConfig, Split
from klformer.lab.tasks.files import entries, first_existing, is_folder, nothing_usable, reading, say
from klformer.lab.tasks.inputs import TextInputs, inputs_from_json
from klformer.lab.tasks.own import OwnFiles
from klformer.lab.tasks.presets import Preset, language_presets
from klformer.lab.tokens import Tokens, TokensConfig, make_tokens
from klformer.lab.training.objective import Objective

#: WikiText's own names.
_WIKI: dict[Split, tuple[str, ...]] = {
    "train": ("wiki.train.raw", "wiki.train.tokens"),
    "validation": ("wiki.valid.raw", "wiki.valid.tokens"),
    "test": ("wiki.test.raw", "wiki.test.tokens"),
}
#: Characters from which word pieces are learned; of larger corpora evenly spaced lines.
_SAMPLE = 64 << 20
_LINES = 1000
#: A word that WikiText leaves out, and what stands for it: no piece of any vocabulary, so that it is never guessed.
_LEFT_OUT, _NOTHING = "<unk>", "\u2610"


class CorpusData(DataConfig):
    """Where the texts are."""

    train: Path | None = None
    """A text file, or a folder of them (*.txt, *.raw, *.tokens). Default: wiki.train.raw or wiki.train.tokens in the
    root, else all text files of the root."""

    validation: Path | None = None
    """The same for validation. Default: wiki.valid.* in the root, else the last part of train."""

    test: Path | None = None
    """The same for test. Default: wiki.test.* in the root, else the part of train before that."""

    encoding: str = "utf-8"
    """Encoding of the texts."""

    tokens: TokensConfig = Field(default_factory=lambda: TokensConfig(kind="wordpiece"))
    """How texts become sequences."""


PRESETS = language_presets(
    paper={
        "optimiser": {"learning_rate": 5e-4},
        "schedule": {"warmup_steps": 10_000},
        "training": {"max_epochs": 5},
    },
    laptop={
        "data": {"tokens": {"kind": "wordpiece", "vocab_size": 4096}, "validation_limit": 500, "test_limit": 1000},
        "optimiser": {"learning_rate": 8e-3},
        "schedule": {"warmup_steps": 300},
        "training": {"max_steps": 6_000, "evaluate_every": 1000, "checkpoint_every": 1000, "log_every": 50},
    },
)


class Corpus(OwnFiles):
    """Texts to pretrain on, cut into blocks of `max_len` tokens.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from klformer.lab.tasks import TASKS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "poems.txt"
        ...     _ = file.write_text("The rain is falling all around.\\n" * 100)
        ...     config = TASKS["corpus"].data_config(train=file, tokens={"kind": "bytes"}, max_len=64)
        ...     task = TASKS["corpus"](config, quiet=True)
        ...     train = task.load("train")
        >>> task.detail(), len(train), train.first[0].shape
        ('poems', 38, (64,))
    """

    name: ClassVar[str] = "corpus"
    title: ClassVar[str] = "Corpus"
    summary: ClassVar[str] = "texts without labels, for `klformer pretrain`: WikiText, a text file, a folder of them"
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    data_config: ClassVar[type[DataConfig]] = CorpusData
    default_max_len: ClassVar[int] = 512

    config: CorpusData

    def _set_up(self) -> None:
        self._inputs: TextInputs | None = None
        self._adopted: Knowledge = {}
        self._store = TokenStore(DataConfig().folder() / "tokens")

    def objective(self) -> Objective:
        raise ArgumentError("a corpus has no labels to train on; `klformer pretrain --task corpus` guesses its tokens")

    def shape(self) -> InputShape:
        return self._known().shape(self.max_len)

    def adopt(self, knowledge: Knowledge) -> None:
        self._adopted = knowledge.get("inputs", {})

    def learn(self) -> Knowledge:
        if self._adopted:
            return {"inputs": self._adopted}
        return {"inputs": TextInputs(make_tokens(self.config.tokens, self._sample())).as_json()}

    def know(self, knowledge: Knowledge) -> None:
        inputs = inputs_from_json(knowledge.get("inputs", {}))
        assert isinstance(inputs, TextInputs)
        self._inputs = inputs

    def location(self) -> str:
        files = self._files("train")
        if not files:
            return f"{self.root} (nothing found: {', '.join(self._looked_for())})"
        return str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"

    def detail(self) -> str:
        files = self._files("train")
        if not files:
            return ""
        return files[0].stem if len(files) == 1 and files[0].name not in _WIKI["train"] else files[0].parent.name

    def _has(self, part: Split) -> bool:
        return bool(self._files(part))

    def read(self, part: Split) -> Examples:
        ids = self._ids(part)
        count = len(ids) // self.max_len
        if not count:
            raise DataError(
                f"{part} has {len(ids):,} tokens, fewer than one block of {self.max_len}; --data.max-len makes it "
                f"shorter: {self.location()}"
            )
        offsets = np.arange(count + 1, dtype=np.int64) * self.max_len
        return Examples(Sequences(ids[: offsets[-1]], offsets), np.zeros(count, np.int64))

    def _cut(self, examples: Examples, start: int, end: int) -> Examples:
        """Hold out the last blocks, as they are: nothing of a mapped file is copied."""
        offsets = examples.first.offsets[start : end + 1]
        values = examples.first.values[offsets[0] : offsets[-1]]
        return Examples(Sequences(values, offsets - offsets[0]), examples.targets[start:end])

    def _known(self) -> TextInputs:
        if self._inputs is None:
            self.know(self.learn())
        assert self._inputs is not None
        return self._inputs

    def _ids(self, part: Split) -> AnyArray:
        files, tokens = self._files(part), self._known().tokens
        if not files:
            raise nothing_usable(self.root, self._looked_for())
        described = json.dumps([tokens.as_json(), self.config.encoding, [sha256(path) for path in files]])
        fingerprint = hashlib.sha256(described.encode()).hexdigest()[:32]
        return self._store.get(fingerprint, self._encoded(files, tokens), vocab_size=tokens.vocab_size)

    def _encoded(self, files: list[Path], tokens: Tokens) -> Iterator[AnyArray]:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        say(f"tokenising {files[0]}{more}", quiet=self.quiet)
        lines: list[str] = []
        for line in self._lines(files, _NOTHING):
            lines.append(line)
            if len(lines) == _LINES:
                yield np.concatenate(tokens.encode(lines))
                lines = []
        if lines:
            yield np.concatenate(tokens.encode(lines))

    def _sample(self) -> Iterator[str]:
        """Yield lines to learn from."""
        files = self._files("train")
        if not files:
            raise nothing_usable(self.root, self._looked_for())
        every = 1 + sum(path.stat().st_size for path in files) // _SAMPLE
        for number, line in enumerate(self._lines(files, "")):
            if number % every == 0:
                yield line

    def _lines(self, files: list[Path], left_out: str) -> Iterator[str]:
        for path in files:
            number = 0
            with reading(path), path.open(encoding=self.config.encoding) as file:
                try:
                    for line in file:
                        number += 1
                        text = line.strip()
                        if text:
                            yield text.replace(_LEFT_OUT, left_out) if path.suffix == ".tokens" else text
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"is not {self.config.encoding}: {error.reason}; give its encoding: --data.encoding latin-1 "
                        "or another",
                        file=path,
                        line=number + 1,
                    ) from error

    def _files(self, part: Split) -> list[Path]:
        given: Path | None = getattr(self.config, part)
        if given is not None:
            path = given.expanduser()
            return _texts(path) if is_folder(path) else [path]
        if self.config.train is not None:
            return []  # whatever is in the root belongs to something else
        found = first_existing(self.root / name for name in _WIKI[part])
        if found is not None:
            return [found]
        return _texts(self.root) if part == "train" else []

    @staticmethod
    def _looked_for() -> list[str]:
        return [*_WIKI["train"], "*.txt", "--data.train FILE or FOLDER"]


def _texts(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.suffix in (".txt", ".raw", ".tokens")]
