"""ListOps of Long Range Arena: the value, a digit, of a nested expression such as [MAX 2 9 [MIN 4 7 ] 0 ].

Read from `basic_{train,val,test}.tsv` where they are found, and otherwise generated with the same distribution on
first use, as files of the same format. The tokens are the digits, the four operators and `]`; parentheses are
dropped.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np

from klformer.checks import check_count
from klformer.errors import ArgumentError, DataError
from klformer.files import replacing
from klformer.lab.data.sequences import ByteRows, Examples
from klformer.lab.tasks.base import InputChunk, Task
from klformer.lab.tasks.config import DataConfig, GeneratedData, Split
from klformer.lab.tasks.files import GeneratedFolder, first_existing, parse_label, progress, read_tabbed
from klformer.lab.tasks.inputs import chunks_of_rows, rows_of_texts
from klformer.lab.tasks.presets import PAPER_OPTIMISER, Preset, lra_presets, paper_attention
from klformer.lab.tasks.tables import Place

MAX_DEPTH = 10
MAX_ARGUMENTS = 10


def sum_modulo_ten(values: Sequence[int]) -> int:
    return sum(values) % 10


def median(values: Sequence[int]) -> int:
    """Return the median; of an even number of values, the mean of the middle two cut to a whole number."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": median,
    "[SM": sum_modulo_ten,
}
TOKENS = (*"0123456789", *OPERATORS, "]")


def evaluate(tokens: Iterable[str]) -> int:
    """Compute the value of an expression, given as tokens without parentheses."""
    # The outermost list collects the result.
    stack: list[tuple[str, list[int]]] = [("", [])]
    for token in tokens:
        if token in OPERATORS:
            stack.append((token, []))
        elif token == "]":
            operator, values = stack.pop()
            if not operator or not values:
                raise ArgumentError("a ] closes nothing, or an operator without arguments")
            stack[-1][1].append(OPERATORS[operator](values))
        elif token in TOKENS:
            stack[-1][1].append(int(token))
        else:
            raise ArgumentError(f"unknown token {token!r}")
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise ArgumentError("the tokens are not one whole expression")
    return stack[0][1][0]


class ExpressionGenerator:
    """Distinct random expressions with max_len / 4 < tokens < max_len. LRA's are those of max_len 2,000.

    LRA's root is a digit three times in four, which is too short to be kept; here the root is always an operator,
    which leaves the same distribution.
    """

    def __init__(self, seed: int, max_len: int = 2_000) -> None:
        check_count("max_len", max_len, minimum=20)
        self._max_len = max_len
        self._next_node = _nodes(np.random.default_rng(seed)).__next__
        self._seen: set[bytes] = set()

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield sources and values, without end."""
        while True:
            source, value, length = self._grow(1)
            if self._max_len / 4 < length < self._max_len:
                digest = hashlib.blake2b(source.encode(), digest_size=16).digest()
                if digest not in self._seen:
                    self._seen.add(digest)
                    yield source, value

    def _grow(self, depth: int) -> tuple[str, int, int]:
        """Return source, value and number of tokens of an expression whose root, an operator, is at this depth."""
        operator, head, arguments, digits, values = self._next_node()
        length = len(values) + 2
        if depth + 1 == MAX_DEPTH:
            arguments = digits
        elif "[" in arguments:
            sources, results = list(arguments), list(values)
            for position, argument in enumerate(arguments):
                if argument == "[":
                    sources[position], results[position], tokens = self._grow(depth + 1)
                    length += tokens - 1
            return f"{head}{' ) '.join(sources)} ) ] )", operator(results), length
        return f"{head}{' ) '.join(arguments)} ) ] )", operator(values), length


def _nodes(generator: np.random.Generator) -> Iterator[tuple[Callable[[Sequence[int]], int], str, str, str, bytes]]:
    """Yield random operators with their arguments: the operator, how its source begins, its arguments as a digit or "["
    for an operator each, the digits that they are where no operator is allowed, and these as numbers.

    A tree has hundreds of nodes: drawing them in blocks is several times faster than asking the generator for each
    argument.
    """
    counts = range(2, MAX_ARGUMENTS + 1)
    heads = [
        (function, count, "( " * (count + 1) + name + " ") for count in counts for name, function in OPERATORS.items()
    ]
    # Of forty equally likely values, thirty are digits and ten are operators.
    letters = bytes(ord("[") if value >= 30 else ord("0") + value % 10 for value in range(256))
    block = 1 << 14
    while True:
        draws = generator.integers(0, 40, block * MAX_ARGUMENTS, np.uint8)
        arguments = draws.tobytes().translate(letters).decode()
        values = (draws % 10).tobytes()
        digits = (draws % 10 + ord("0")).astype(np.uint8).tobytes().decode()
        for index, head in enumerate(generator.integers(0, len(heads), block).tolist()):
            operator, count, text = heads[head]
            node = slice(index * MAX_ARGUMENTS, index * MAX_ARGUMENTS + count)
            yield operator, text, arguments[node], digits[node], values[node]


FILES: dict[Split, str] = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
#: 0 is padding.
TOKEN_IDS = {token: index for index, token in enumerate(TOKENS, start=1)}
#: Operators as single bytes outside ASCII, so that every token is one byte.
_SHORT = {name.encode(): bytes([index]) for index, name in enumerate(OPERATORS, start=128)}
_ID_OF_BYTE = bytearray(256)
for _token, _id in TOKEN_IDS.items():
    _ID_OF_BYTE[_SHORT.get(_token.encode(), _token.encode())[0]] = _id


PRESETS = lra_presets(
    paper={
        "model": {
            "num_layers": 6, "num_heads": 8, "model_dim": 512, "head_dim": 64, "ffn_dim": 2048, "head_hidden_dim": 2048,
            "dropout": 0.1, "positions": "sinusoidal",
        },
        "optimiser": {**PAPER_OPTIMISER, "learning_rate": 5e-3},
        "schedule": {"kind": "rsqrt", "warmup_steps": 1000},
        "training": {"batch_size": 32, "max_steps": 10_000},
        "attention": paper_attention(
            gmm_rks=256, fastfood_rks=64, generative_rks=256, gmm_prf=256, fastfood_prf=64, generative_prf=128,
        ),
    },
    laptop={
        # The mean of all positions and a convolution over neighbours, as for Text: with CLS a larger learning rate does
        # not help.
        "data": {"num_examples": 20_000, "max_len": 200, "validation_limit": 1_000},
        "model": {"num_layers": 2, "positions": "sinusoidal"},
        "optimiser": {"learning_rate": 2e-3},
        "training": {"batch_size": 32, "max_steps": 1000, "evaluate_every": 500, "checkpoint_every": 250},
    },
    workstation={"training": {"batch_size": 16, "max_steps": 4_000, "evaluate_every": 400}},
)  # fmt: skip


class ListOps(Task):
    """ListOps, read or generated.

    Files are looked for in `lra_release/listops-1000`, `listops` and the root itself. If there are none, or
    `num_examples` asks for a number of them, expressions with max_len / 4 < tokens < max_len are generated, which
    with the default of 2,000 are LRA's; expressions in files are cut at max_len. Validation and test have 2,000
    examples and depend on the seed, not on the size of the training set.
    `read_inputs` reads expressions in the column `Source`, as LRA's files have them.

    Examples:
        >>> import tempfile
        >>> from klformer.lab.tasks import TASKS, GeneratedData
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     task = TASKS["listops"](GeneratedData(root=folder, num_examples=100, max_len=40), quiet=True)
        ...     train = task.load("train")
        >>> len(train), task.num_classes, bool(train.first.lengths.max() < 40)
        (100, 10, True)
    """

    name: ClassVar[str] = "listops"
    title: ClassVar[str] = "ListOps"
    summary: ClassVar[str] = "value of a nested expression of MIN, MAX, MED and SM, up to 2,000 tokens (generated)"
    num_classes: int = 10
    chance: ClassVar[float | None] = 0.1
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    vocab_size: int | None = len(TOKENS) + 1
    is_generated: ClassVar[bool] = True
    data_config: ClassVar[type[DataConfig]] = GeneratedData
    default_max_len: ClassVar[int] = 2_000
    default_num_examples: ClassVar[int] = 96_000
    evaluation_size: ClassVar[int] = 2_000
    official_sizes = MappingProxyType({"train": 96_000, "validation": 2_000, "test": 2_000})

    config: GeneratedData

    def _set_up(self) -> None:
        config = self.config
        num_examples = config.num_examples or self.default_num_examples
        self._generated = GeneratedFolder(
            self.root / "listops" / f"train{num_examples}-len{self.max_len}-seed{config.seed}",
            {
                "generator": "listops-1",
                "train": num_examples,
                "evaluation": self.evaluation_size,
                "max_len": self.max_len,
                "seed": config.seed,
            },
        )

    def location(self) -> str:
        if folder := self._found():
            return f"{folder} (read)"
        return self._generated.describe()

    def validation_source(self) -> Literal["file", "train", "test"]:
        return "file"

    def is_official(self) -> bool:
        return self._found() is not None

    def notes(self) -> list[str]:
        notes = super().notes()
        if self.config.num_examples is not None and (folder := self._folder_of_files()):
            notes.append(
                f"the files in {folder} are not read: data.num_examples={self.config.num_examples} asks for generated "
                f"expressions; --data.num-examples None --data.max-len {self.default_max_len} reads them"
            )
        return notes

    def prepare(self) -> None:
        if self._found() or self._generated.is_complete:
            return
        self._generated.open(quiet=self.quiet)
        # Train is last, so that validation and test are the same for every size of it.
        settings = self._generated.settings
        sizes: dict[Split, int] = {
            "test": settings["evaluation"],
            "validation": settings["evaluation"],
            "train": settings["train"],
        }
        rows = iter(ExpressionGenerator(settings["seed"], settings["max_len"]))
        with progress("generating ListOps", sum(sizes.values()), quiet=self.quiet) as advance:
            for split, size in sizes.items():
                with replacing(self._generated.path / FILES[split]) as path, path.open("wb") as file:
                    file.write(b"Source\tTarget\r\n")
                    for source, value in islice(rows, size):
                        file.write(f"{source}\t{value}\r\n".encode())
                        advance(1)
        self._generated.complete({FILES[split]: size for split, size in sizes.items()})

    def _found(self) -> Path | None:
        """Return the folder of files that are read instead of generating."""
        return self._folder_of_files() if self.config.num_examples is None else None

    def _folder_of_files(self) -> Path | None:
        """Return the folder of files that were not generated here."""
        folders = (self.root / "lra_release" / "listops-1000", self.root / "listops", self.root)
        path = first_existing(folder / name for folder in folders for name in FILES.values())
        return path.parent if path else None

    def read(self, part: Split) -> Examples:
        if folder := self._found():
            return read_listops(folder / FILES[part], self.max_len)
        self.prepare()
        path, rows = self._generated.verified(FILES[part])
        examples = read_listops(path, self.max_len)
        if len(examples) != rows:
            raise DataError(f"has {len(examples)} rows where the manifest says {rows}", file=path)
        return examples

    def read_inputs(self, path: Path, *, keep: Sequence[str], chunk: int) -> Iterator[InputChunk]:
        def parse(place: Place, source: str) -> bytes:
            return _checked(source.encode(), place.path, place.number)[: self.max_len]

        rows = rows_of_texts(path, ["Source"], keep, parse)
        return chunks_of_rows(rows, chunk, lambda cells: ByteRows.of(ids for (ids,) in cells).as_they_are())


def read_listops(path: Path, max_len: int) -> Examples:
    """Read a file in LRA's format."""
    sources, labels = ByteRows(), []
    for number, source, target in _rows(path):
        sources.add(_checked(source, path, number)[:max_len])
        labels.append(parse_label(target.decode("latin-1"), 10, file=path, line=number))
    if not labels:
        raise DataError("has no rows after the header", file=path)
    return Examples(sources.as_they_are(), np.asarray(labels, np.int64))


def _checked(source: bytes, path: Path, line: int) -> bytes:
    """Return the ids of the tokens of an expression whose brackets are closed."""
    ids = _encode(source, path, line)
    opened, closed = source.count(b"["), source.count(b"]")
    if opened != closed:
        raise DataError(f"has {opened} operators and {closed} ], which must be as many", file=path, line=line)
    return ids


def _rows(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield line number, source and target of every row."""
    rows = read_tabbed(path, ("Source", "Target"))
    header = next(rows, None)
    if header is None:
        raise DataError("is empty; the header must be Source and Target, separated by a tab", file=path)
    if header[1] != [b"Source", b"Target"]:
        raise DataError("the header must be Source and Target, separated by a tab", file=path, line=1)
    for number, (source, target) in rows:
        yield number, source, target


def _encode(source: bytes, path: Path, line: int) -> bytes:
    """Return the ids of the tokens, without parentheses.

    With operators as single bytes every other byte is a token and those between are spaces: a few passes in C instead
    of a loop over a hundred million tokens.
    """
    short = source
    for name, byte in _SHORT.items():
        short = short.replace(name, byte)
    ids = short[::2].translate(None, b"()").translate(_ID_OF_BYTE)
    if source.isascii() and ids and 0 not in ids and not short[1::2].strip(b" "):
        return ids
    # Spacing of another kind, or an error: token by token.
    tokens = [token.decode("latin-1") for token in source.split() if token not in (b"(", b")")]
    for token in tokens:
        if token not in TOKEN_IDS:
            raise DataError(f"unknown token {token!r}; tokens are {' '.join(TOKENS)} ( )", file=path, line=line)
    if not tokens:
        raise DataError("the source is empty", file=path, line=line)
    return bytes(TOKEN_IDS[token] for token in tokens)
