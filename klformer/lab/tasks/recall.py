"""Associative recall: pairs of a key and a value, then keys whose values are asked for.

Nothing but attention can solve it: the keys of a sequence get their values anew, so that a query has to find its key
among the others. How sharp the kernel is decides how many pairs can be told apart. There are three forms.

pairs    a position is a whole pair, the vector (one-hot key, one-hot value); a query is a key without a value. One
         layer that sees everything is enough
causal   keys and values are tokens of their own, k1 v1 k2 v2 ..., then queries among blanks, and positions see the
         past only. It takes two layers: one that gives every value its key, one that recalls
mqar     as causal, with the distribution of "multi-query associative recall" (Arora et al., Zoology, 2023): values are
         different ones too, queries come at every second position, early ones far more often, and what is left of the
         length are random tokens

The keys of a sequence are different ones. Queries are different keys of the sequence, after the pairs. In the first two
forms values are drawn independently, queries have random positions, and what is left of the length is blank.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from klformer.errors import ArgumentError
from klformer.lab.data.sequences import IGNORED, AnyArray, Examples, Sequences
from klformer.lab.tasks.base import GeneratedTask
from klformer.lab.tasks.config import DataConfig, GeneratedData
from klformer.lab.tasks.presets import ANY, LRA_OPTIMISER, SMALL_TRAINING, Preset, Section
from klformer.lab.training.objective import Objective
from klformer.lab.training.objectives import PositionClassification

PAIRS, SYMBOLS, QUERIES = 16, 64, 4
_BLOCK = 1 << 22
#: Zoology's exponent: the pairs' queries come after a gap g with probability proportional to g^(0.01 - 1).
_GAP_POWER = 0.01

_TRAINING: Section = {
    **SMALL_TRAINING, "batch_size": 64, "max_steps": 600, "evaluate_every": 100, "checkpoint_every": 200,
    "evaluation_batch_size": 250,
}  # fmt: skip
_ATTENTION: Section = {ANY: {"num_frequencies": 64}}

_LAPTOP: Preset = {
    "model": {
        "num_layers": 1, "num_heads": 2, "model_dim": 64, "head_dim": 32, "ffn_dim": 128, "head_hidden_dim": 64,
        "dropout": 0.0, "positions": "none",
    },
    "optimiser": {**LRA_OPTIMISER, "learning_rate": 3e-3, "weight_decay": 0.0},
    "schedule": {"kind": "cosine", "warmup_steps": 50},
    "training": _TRAINING,
    "attention": _ATTENTION,
}  # fmt: skip
_CAUSAL: Preset = {**_LAPTOP, "model": {**_LAPTOP["model"], "num_layers": 2, "positions": "learned"}}

PRESETS: Mapping[str, Preset] = {
    "laptop": _LAPTOP,
    "causal": {
        **_CAUSAL,
        "data": {"form": "causal", "num_pairs": 8, "num_queries": 8, "num_symbols": 32},
        # Softmax has 99.8% after 200 steps. gmm-rks has 74% after 1,200 if these are all, and 97% after 3,000.
        "training": {**_TRAINING, "max_steps": 3000},
    },
    "mqar": {
        **_CAUSAL,
        "data": {"form": "mqar", "num_pairs": 4, "num_queries": 4, "num_symbols": 128, "max_len": 64},
        # Softmax has 100% after 700 steps.
        "training": {**_TRAINING, "max_steps": 1500},
    },
}


class RecallData(GeneratedData):
    """How many pairs of how many symbols, and what is asked of them."""

    form: Literal["pairs", "causal", "mqar"] = "pairs"
    """pairs: a position is a pair, for one layer. causal: keys and values apart, for two layers that see the past.
    mqar: causal, with Zoology's distribution of queries and random tokens between them."""

    num_pairs: int = Field(PAIRS, ge=1)
    """Pairs in a sequence."""

    num_symbols: int = Field(SYMBOLS, ge=2)
    """Different keys, and as many different values."""

    num_queries: int = Field(QUERIES, ge=1)
    """Keys of a sequence whose values are asked for."""

    @model_validator(mode="after")
    def _fits(self) -> "RecallData":
        if self.num_pairs > self.num_symbols:
            raise ArgumentError(
                f"num_pairs must be at most num_symbols={self.num_symbols}, because keys are different ones, "
                f"got {self.num_pairs}"
            )
        if self.num_queries > self.num_pairs:
            raise ArgumentError(
                f"num_queries must be at most num_pairs={self.num_pairs}, because each asks for another key, "
                f"got {self.num_queries}"
            )
        if self.max_len is not None and self.max_len < self.shortest:
            raise ArgumentError(
                f"max_len must be at least {self.shortest}, for {self.num_pairs} pairs and {self.num_queries} queries "
                f"in the form {self.form!r}, got {self.max_len}"
            )
        return self

    @property
    def shortest(self) -> int:
        """Positions that pairs and queries take."""
        for_pair, for_query = {"pairs": (1, 1), "causal": (2, 1), "mqar": (2, 2)}[self.form]
        return for_pair * self.num_pairs + for_query * self.num_queries


class Recall(GeneratedTask):
    """Values of keys, each among `num_symbols`; 20,000 sequences for training unless `num_examples` says otherwise,
    and 1,000 each for validation and test. They are generated in memory, in a second.

    Examples:
        Two pairs, then the key of one of them:

        >>> import numpy as np
        >>> from klformer.lab.tasks import TASKS
        >>> config = TASKS["recall"].data_config(num_pairs=2, num_symbols=4, num_queries=1, num_examples=100)
        >>> train = TASKS["recall"](config).load("train")
        >>> keys, values = np.split(train.first[0], 2, axis=-1)  # one-hot, (3, 4) each
        >>> asked = keys[:2].argmax(-1).tolist().index(keys[2].argmax())
        >>> bool(train.targets[0, 2] == values[asked].argmax())
        True
    """

    name: ClassVar[str] = "recall"
    title: ClassVar[str] = "Recall"
    summary: ClassVar[str] = (
        "values of keys among pairs of both, in one layer, or causal in two, also as MQAR (generated)"
    )
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    num_classes: int = SYMBOLS
    input_dim: int | None = 2 * SYMBOLS
    data_config: ClassVar[type[DataConfig]] = RecallData
    default_max_len: ClassVar[int] = PAIRS + QUERIES
    default_num_examples: ClassVar[int] = 20_000
    held_out: ClassVar[int] = 1_000

    config: RecallData

    def _set_up(self) -> None:
        config = self.config
        self.max_len = config.max_len or config.shortest
        self.num_classes = config.num_symbols
        self.is_causal = config.form != "pairs"
        self.vocab_size = 2 * config.num_symbols + 1 if self.is_causal else None
        self.input_dim = None if self.is_causal else 2 * config.num_symbols

    def detail(self) -> str:
        """Return form, pairs and symbols, queries and length, where they are not the usual ones: each is a task of its
        own."""
        config = self.config
        unusual = config.num_pairs != PAIRS or config.num_symbols != SYMBOLS
        parts = [
            config.form if self.is_causal else "",
            f"{config.num_pairs} of {config.num_symbols}" if unusual else "",
            f"queries {config.num_queries}" if config.num_queries != QUERIES else "",
            f"length {self.max_len}" if self.max_len != config.shortest else "",
        ]
        return " ".join(filter(None, parts))

    def objective(self) -> Objective:
        return PositionClassification(num_classes=self.num_classes, max_len=self.max_len)

    def _make(self, generator: np.random.Generator, count: int) -> Examples:
        keys, values, targets = generate(generator, count, self.config, self.max_len)
        return Examples(Sequences.from_matrix(self._inputs(keys, values)), targets)

    def _inputs(self, keys: NDArray[np.int64], values: NDArray[np.int64]) -> AnyArray:
        """Encode keys and values of positions, -1 where there is none, (N, length) each: as vectors, or as tokens."""
        symbols = self.config.num_symbols
        if self.is_causal:
            tokens = np.where(keys >= 0, keys, np.where(values >= 0, symbols + values, 2 * symbols))
            return tokens.astype(np.min_scalar_type(2 * symbols))
        # Row -1 of the table is the last one, which is zero.
        one_hot = np.eye(symbols + 1, symbols, dtype=np.uint8)
        return np.concatenate([one_hot[keys], one_hot[values]], axis=-1)


def generate(
    generator: np.random.Generator, count: int, config: RecallData, length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Generate keys and values of all positions, -1 where there is none, and targets, IGNORED but at queries: (count,
    length) each."""
    pairs, queries, symbols = config.num_pairs, config.num_queries, config.num_symbols
    chosen = _different(generator, count, symbols, pairs)
    keys, values = np.full((2, count, length), -1, np.int64)
    targets = np.full((count, length), IGNORED, np.int64)
    if config.form == "mqar":
        assigned = _different(generator, count, symbols, pairs)
        tokens = generator.integers(0, 2 * symbols, (count, length))
        keys, values = np.where(tokens < symbols, tokens, -1), np.where(tokens < symbols, -1, tokens - symbols)
    else:
        assigned = generator.integers(0, symbols, (count, pairs))
    if config.form == "pairs":
        first = pairs
        keys[:, :pairs], values[:, :pairs] = chosen, assigned
    else:
        first = 2 * pairs
        keys[:, 0:first:2], values[:, 1:first:2] = chosen, assigned
        keys[:, 1:first:2], values[:, 0:first:2] = -1, -1
    asked = _different(generator, count, pairs, queries)
    if config.form == "mqar":
        gaps = np.arange(1, (length - first) // 2 + 1)
        places = first + 2 * _different(generator, count, len(gaps), queries, gaps ** (_GAP_POWER - 1))
    else:
        places = first + _different(generator, count, length - first, queries)
    np.put_along_axis(values, places, -1, 1)
    np.put_along_axis(keys, places, np.take_along_axis(chosen, asked, 1), 1)
    np.put_along_axis(targets, places, np.take_along_axis(assigned, asked, 1), 1)
    return keys, values, targets


def _different(
    generator: np.random.Generator, count: int, high: int, size: int, weights: NDArray[np.floating[Any]] | None = None
) -> NDArray[np.int64]:
    """Draw (count, size) numbers below `high`, different in every row, one after the other with the given weights."""
    # In blocks of so many numbers: 20,000 sequences with 4,096 keys to choose from take a gigabyte at once.
    blocks = np.diff([*range(0, count, max(1, _BLOCK // high)), count])
    if weights is None:
        return np.concatenate([np.argsort(generator.random((rows, high), np.float32), 1)[:, :size] for rows in blocks])
    # The first of exponential clocks with these rates is drawn first, then the first of those that are left.
    clocks = (generator.standard_exponential((rows, high)) / weights for rows in blocks)
    return np.concatenate([np.argsort(times, 1)[:, :size] for times in clocks])
