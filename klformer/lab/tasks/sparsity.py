"""The synthetic task of the paper's Appendix D: the sum of the values v in {-1, 1} at the positions that matter (a =
1).

A position is the many-hot vector (v = 1, v = -1, a). `sparsity` is the probability that a position does *not* matter:
P(a = 1) = 1 - sparsity. (The paper says that the bias of a "defines the sparsity" and that the numbers in its figure
are "inversely proportional to" it. Its three data sets, 0.1, 0.5 and 0.9, are the same three either way; 0.1 in the
figure is 0.9 here.)

No sum over a prefix may leave [-4, 4]. The paper biases the flip of v for this and does not say how; here the coin is
fair, except that v is turned inwards where the sum is at +-4 and the position matters. The sum is one of nine
classes, and -4 and 4 come half as often as the others: more is generated than needed, and every class is kept equally
often.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from klformer.checks import check_count
from klformer.errors import DataError
from klformer.files import replacing
from klformer.lab.data.sequences import Examples, Sequences
from klformer.lab.tasks.base import Task
from klformer.lab.tasks.config import DataConfig, GeneratedData, Split
from klformer.lab.tasks.files import GeneratedFolder, progress
from klformer.lab.tasks.presets import (
    LAPTOP_ATTENTION,
    LRA_OPTIMISER,
    PAPER_OPTIMISER,
    SMALL_TRAINING,
    Preset,
    paper_attention,
)

MAX_SUM = 4
NUM_CLASSES = 2 * MAX_SUM + 1
_FILE = "data.npz"
_TRAIN_FRACTION = 0.8
#: A position is stored as one byte, 2 a + (v = 1); this is its vector.
_VECTORS = np.array([[0, 1, 0], [1, 0, 0], [0, 1, 1], [1, 0, 1]], np.uint8)
_BLOCK = 20_000
#: Over-generation by more than this means that a class hardly occurs.
_MAX_FACTOR = 50


PRESETS: Mapping[str, Preset] = {
    "paper": {
        # Left open by the paper: the number of heads (4 = 64 / 16), dropout (0.1) and the number of epochs (100).
        "model": {
            "num_layers": 3, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 64, "head_hidden_dim": 64,
            "dropout": 0.1, "positions": "learned",
        },
        "optimiser": {**PAPER_OPTIMISER, "learning_rate": 5e-6},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "training": {"batch_size": 400, "max_epochs": 100, "keep_milestones": True},
        "attention": paper_attention(
            gmm_rks=64, fastfood_rks=64, generative_rks=64, gmm_prf=64, fastfood_prf=64, generative_prf=64,
        ),
    },
    "laptop": {
        "data": {"num_examples": 50_000, "max_len": 64, "validation_limit": 1_000, "test_limit": 2_000},
        "model": {
            "num_layers": 3, "num_heads": 4, "model_dim": 64, "head_dim": 16, "ffn_dim": 64, "head_hidden_dim": 64,
            "dropout": 0.0, "positions": "learned",
        },
        "optimiser": {**LRA_OPTIMISER, "learning_rate": 2e-3, "weight_decay": 0.01},
        "schedule": {"kind": "cosine", "warmup_steps": 100},
        "training": {
            **SMALL_TRAINING, "batch_size": 64, "max_steps": 800, "evaluate_every": 400, "checkpoint_every": 200,
            "keep_milestones": True,
        },
        "attention": LAPTOP_ATTENTION,
    },
}  # fmt: skip


class SparsityData(GeneratedData):
    """Where the data is, how much of it is generated, and how much of it matters."""

    sparsity: float = Field(0.5, ge=0, lt=1)
    """The probability that a position does not matter. The paper has 0.1, 0.5 and 0.9."""


class Sparsity(Task):
    """Sum of the relevant values, nine classes; 200,000 sequences of length 200 unless `num_examples` and `max_len`
    say otherwise.

    The paper has 80% for training and the rest for validation, and no test set. "holdout" halves the rest into
    validation and test; "lra" reports on what it selects on, as the paper does: validation and test are both the
    whole rest.

    Examples:
        >>> import tempfile
        >>> from klformer.lab.tasks import TASKS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = TASKS["sparsity"].data_config(root=folder, num_examples=900, max_len=50, sparsity=0.9)
        ...     task = TASKS["sparsity"](config, quiet=True)
        ...     sizes = len(task.load("train")), len(task.load("validation")), len(task.load("test"))
        >>> task.label(), task.num_classes, sizes
        ('Sparsity 0.9', 9, (720, 90, 90))
    """

    name: ClassVar[str] = "sparsity"
    title: ClassVar[str] = "Sparsity"
    summary: ClassVar[str] = "sum of the values at the positions that matter, length 200 (generated)"
    num_classes: int = NUM_CLASSES
    chance: ClassVar[float | None] = 1 / NUM_CLASSES
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    input_dim: int | None = 3
    is_generated: ClassVar[bool] = True
    data_config: ClassVar[type[DataConfig]] = SparsityData
    default_max_len: ClassVar[int] = 200
    default_num_examples: ClassVar[int] = 200_000

    config: SparsityData

    def _set_up(self) -> None:
        config = self.config
        self.num_examples = config.num_examples or self.default_num_examples
        check_count("num_examples", self.num_examples, minimum=2 * NUM_CLASSES, maximum=sys.maxsize)
        settings = {
            "generator": "sparsity-1",
            "num_examples": self.num_examples,
            "length": self.max_len,
            "sparsity": config.sparsity,
            "seed": config.seed,
        }
        folder = f"sparsity{config.sparsity}-{self.num_examples}x{self.max_len}-seed{config.seed}"
        self._generated = GeneratedFolder(self.root / "sparsity" / folder, settings)

    def location(self) -> str:
        return self._generated.describe()

    def detail(self) -> str:
        """Return the probability, because each is a task of its own."""
        return f"{self.config.sparsity:g}"

    def describe_protocol(self) -> str:
        if self.config.protocol == "lra":
            return "validation and test are the same 20% of the examples (protocol lra, as in the paper)"
        return "validation and test are 10% of the examples each (protocol holdout); test set used once, at the end"

    def prepare(self) -> None:
        if self._generated.is_complete:
            return
        self._generated.open(quiet=self.quiet)
        with progress(f"generating sparsity {self.config.sparsity:g}", self.num_examples, quiet=self.quiet) as advance:
            codes, labels = generate(
                self.num_examples, self.max_len, sparsity=self.config.sparsity, seed=self.config.seed, advance=advance
            )
        with replacing(self._generated.path / _FILE) as path, path.open("wb") as file:
            np.savez(file, codes=codes, labels=labels)
        self._generated.complete({_FILE: self.num_examples})

    def _select(self, split: Split) -> Examples:
        examples = self.read(split)
        train = round(_TRAIN_FRACTION * len(examples))
        start, end = {"train": (0, train), "validation": (train, len(examples)), "test": (train, len(examples))}[split]
        if self.config.protocol == "holdout" and split != "train":
            middle = (start + end) // 2
            start, end = (start, middle) if split == "validation" else (middle, end)
        return examples.take(np.arange(start, end))

    def read(self, part: Split) -> Examples:
        # All examples: the protocol takes its part of them.
        self.prepare()
        path, rows = self._generated.verified(_FILE)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                codes, labels = arrays["codes"], arrays["labels"]
        except (BadZipFile, ValueError, KeyError) as error:
            raise DataError(f"does not hold the arrays codes and labels: {error}", file=path) from error
        if codes.shape != (rows, self.max_len) or labels.shape != (rows,):
            raise DataError(f"has arrays of shapes {codes.shape} and {labels.shape}, not of {rows} rows", file=path)
        return Examples(Sequences.from_matrix(_VECTORS[codes]), labels.astype(np.int64))


def generate(
    num_examples: int, length: int, *, sparsity: float, seed: int, advance: Callable[[int], None] = lambda steps: None
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Generate balanced examples in random order: codes 2 a + (v = 1), (N, length), and labels sum + 4, (N,)."""
    generator = np.random.default_rng(seed)
    wanted = np.full(NUM_CLASSES, num_examples // NUM_CLASSES)
    wanted[: num_examples % NUM_CLASSES] += 1
    kept_codes, kept_labels, drawn = [], [], 0
    while wanted.any():
        if drawn > _MAX_FACTOR * (num_examples + _BLOCK):
            raise DataError(
                f"sequences of length {length} at sparsity {sparsity:g} hardly ever sum to "
                f"{int(wanted.argmax()) - MAX_SUM}; more positions must matter"
            )
        codes, labels = _draw(generator, _BLOCK, length, sparsity)
        drawn += _BLOCK
        for label in range(NUM_CLASSES):
            rows = np.flatnonzero(labels == label)[: wanted[label]]
            wanted[label] -= len(rows)
            kept_codes.append(codes[rows])
            kept_labels.append(labels[rows])
            advance(len(rows))
    order = generator.permutation(num_examples)
    return np.concatenate(kept_codes)[order], np.concatenate(kept_labels)[order]


def _draw(
    generator: np.random.Generator, count: int, length: int, sparsity: float
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Draw sequences as they come, not balanced."""
    relevant = generator.random((length, count), np.float32) >= sparsity
    positive = generator.integers(0, 2, (length, count), np.uint8).astype(bool)
    total = np.zeros(count, np.int8)
    for position in range(length):
        here = relevant[position]
        positive[position] &= ~(here & (total == MAX_SUM))
        positive[position] |= here & (total == -MAX_SUM)
        total += here * np.where(positive[position], 1, -1).astype(np.int8)
    codes = (2 * relevant.astype(np.uint8) + positive).T
    return np.ascontiguousarray(codes), (total + MAX_SUM).astype(np.uint8)
