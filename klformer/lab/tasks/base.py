"""What a task is: sequences with targets in three splits, and the protocol that makes the splits.

A task reads the parts that its data comes in. Where no validation set comes with the data, the protocol makes one:

- "lra": validation is the test set, as Long Range Arena does it. The model is selected on what it is reported on.
- "holdout": validation is a seeded random part of the training set; the test set is used once, at the end.

Where the data has an official validation set, both protocols use it. Where it has no test set
either, as a single table of somebody's own, another part of the training set is held out for that.

Most tasks know their shape and their classes. Others find them in their data: those give them as JSON from `learn`, a
run stores that, and `know` takes it up again, so that a run can be used without its training data.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from torch import nn

from klformer.attention import AttentionSpec
from klformer.checks import check_choice
from klformer.errors import ArgumentError, ArgumentTypeError, DataError
from klformer.lab.data import Examples, InputShape, Sequences
from klformer.lab.tasks.config import DataConfig, GeneratedData, Split
from klformer.lab.tasks.files import exists, is_folder
from klformer.lab.tasks.presets import Preset
from klformer.lab.training.objective import Objective
from klformer.lab.training.objectives import Classification

#: What a task has found in its data, as JSON.
Knowledge = Mapping[str, Any]

#: Distinct streams of random numbers for one seed.
_HOLDOUT_STREAM, _LIMIT_STREAM = 1, 2


@dataclass(frozen=True)
class InputChunk:
    """Some rows without labels.

    Args:
        rows: What each is called: its line in a text, its number in a parquet file, its own file.
        sequences: What the model sees of them.
        kept: Fields that are passed on, for each row.
        second: The second sides, where the task has pairs.
    """

    rows: list[int] | list[str]
    sequences: Sequences
    kept: list[tuple[Any, ...]]
    second: Sequences | None = None


class Task(ABC):
    """A task over sequences or pairs of them: the data, what is learned from it, and how it is trained.

    The smallest one has the attributes without a value, one of `vocab_size` and `input_dim`, and `read`.

    Args:
        config: Where the data is and how it is split; of the class that `data_config` names.
        quiet: Say nothing while generating.

    Raises:
        ArgumentTypeError: the configuration is another task's.

    Examples:
        >>> import numpy as np, klformer
        >>> from klformer.lab.data import Examples, Sequences
        >>> @klformer.register_task
        ... class Parity(klformer.Task):
        ...     name, title, summary = "parity", "Parity", "is the number of ones odd"
        ...     num_classes, vocab_size, default_max_len = 2, 3, 16
        ...
        ...     def read(self, part):
        ...         size = {"train": 4000, "test": 500}[part]
        ...         bits = np.random.default_rng((self.config.seed, size)).integers(1, 3, (size, self.max_len))
        ...         return Examples(Sequences.from_matrix(bits), (bits == 2).sum(1) % 2)
        >>> task = klformer.lab.tasks.build_task("parity", klformer.lab.tasks.DataConfig())
        >>> len(task.load("train")), len(task.load("validation")), len(task.load("test"))
        (3600, 400, 500)

        What a task says of itself; a subclass overrides what is otherwise:

        >>> task.shape().vocab_size, task.objective().selecting.name
        (3, 'accuracy')
        >>> task.label(), task.detail(), task.class_names(), task.guess()
        ('Parity', '', None, None)
        >>> task.validation_source(), task.test_source()
        ('train', 'file')
        >>> task.describe_protocol()
        'validation on 10% of the training set (protocol holdout); test set used once, at the end'
        >>> task.is_official(), task.notes(), task.facts(), task.further_tests()
        (True, [], {}, {})
        >>> task.model(klformer.AttentionSpec(name="softmax")) is None  # a Transformer
        True
        >>> task.location() == str(task.root)
        True

        What a run does before it reads:

        >>> task.adopt({})  # what a pretrained run knew
        >>> task.prepare()
        >>> task.know(task.learn())
    """

    #: On the command line.
    name: ClassVar[str]
    #: In tables and figures; the name, if there is none.
    title: ClassVar[str] = ""
    #: What the task is, in a few words.
    summary: ClassVar[str] = ""
    #: Number of classes; not needed where the task has an `objective` of its own. This and the two sizes of inputs are
    #: the class's, or set in __init__ where they depend on the options.
    num_classes: int
    #: The selecting metric of guessing, if that is known.
    chance: ClassVar[float | None] = None
    #: Options of the data; a subclass where the task has some of its own.
    data_config: ClassVar[type[DataConfig]] = DataConfig
    #: Settings by preset and section (tasks/presets.py). There is always a `laptop`.
    presets: ClassVar[Mapping[str, Preset]] = MappingProxyType({})
    #: Number of token ids; None if positions are vectors. Not needed where the task has a `shape` of its own.
    vocab_size: int | None = None
    #: Size of the vectors; None if positions are token ids. Not needed where the task has a `shape` of its own.
    input_dim: int | None = None
    is_pair: ClassVar[bool] = False
    #: Positions see themselves and what comes before them only.
    is_causal: bool = False
    #: Whether the data can be generated, so that `num_examples` has a meaning.
    is_generated: ClassVar[bool] = False
    #: Whether there are no files: what is read is generated at once.
    in_memory: ClassVar[bool] = False
    default_max_len: ClassVar[int]
    #: How rows without labels are called in predictions, and by what.
    row_column: ClassVar[tuple[str, type]] = ("row", int)
    #: Examples of the official files, by part.
    official_sizes: ClassVar[Mapping[Split, int]] = MappingProxyType({})

    def __init__(self, config: DataConfig, *, quiet: bool = False) -> None:
        if not isinstance(config, self.data_config):
            raise ArgumentTypeError(
                f"the data of {self.name} must be a {self.data_config.__name__}, got a {type(config).__name__}"
            )
        self.config = config
        self.quiet = quiet
        self.root = config.folder()
        self.max_len = config.max_len or self.default_max_len
        #: Examples of every part that was read.
        self.sizes: dict[Split, int] = {}
        #: Splits that have fewer examples than their limit.
        self._below_limit: dict[Split, int] = {}
        self._set_up()

    def _set_up(self) -> None:  # noqa: B027 - most tasks have nothing to set
        """Set what depends on the options."""

    @abstractmethod
    def read(self, part: Split) -> Examples:
        """Read a part as the data has it, all of it. A task implements this one.

        Args:
            part: "train", "validation" or "test". Which parts are asked for is told by `validation_source` and
                `test_source`.

        Returns:
            Sequences of at most `max_len`, each with its target.

        Raises:
            DataError: the data is missing or malformed.
        """

    def location(self) -> str:
        """Return where the data is read from, or will be generated to, in words."""
        return "memory (generated from data.seed)" if self.in_memory else str(self.root)

    def shape(self) -> InputShape:
        """Return the form of the sequences: what the class says, if nothing else is known."""
        return InputShape(
            max_len=self.max_len, vocab_size=self.vocab_size, input_dim=self.input_dim, is_pair=self.is_pair
        )

    def objective(self) -> Objective:
        """Return what is learned: classes, if nothing else is said.

        Raises:
            ArgumentError: the data has no targets.
        """
        return Classification(num_classes=self.num_classes)

    def model(self, attention: AttentionSpec | tuple[AttentionSpec, ...]) -> nn.Module | None:
        """Return a model of the task's own, around an attention.

        Args:
            attention: One for all layers, or one for each.

        Returns:
            A module that is called as `Objective.outputs` does; None for a Transformer with a head of the objective's.
        """
        return None

    def guess(self) -> float | None:
        """Return the selecting metric of guessing, if that is known."""
        return self.chance

    def class_names(self) -> tuple[str, ...] | None:
        """Return names of the classes in the order of their numbers; None if they have none, or if there are no
        classes."""
        return None

    def learn(self) -> Knowledge:
        """Find what shape and objective depend on and only the training data tells, as JSON; nothing for most tasks.

        Raises:
            DataError: the training data is missing or malformed.
        """
        return {}

    def know(self, knowledge: Knowledge) -> None:  # noqa: B027 - most tasks have nothing to know
        """Take up what `learn` gave, here or long ago; a task that is asked first learns by itself.

        Args:
            knowledge: As `learn` gives it, or as a run has stored it.

        Raises:
            RunError: it is not what `learn` gives.
        """

    def adopt(self, knowledge: Knowledge) -> None:  # noqa: B027 - most tasks have nothing to choose
        """Choose, before learning, to read inputs as the run did from which weights are taken, as far as there is a
        choice.

        Args:
            knowledge: What that run's task had learned.
        """

    def read_inputs(self, path: Path, *, keep: Sequence[str], chunk: int) -> Iterator[InputChunk]:
        """Read rows of a file without labels, so many at a time, to predict their targets.

        Args:
            path: The file, or a folder of files.
            keep: Columns whose fields are passed on.
            chunk: Rows at a time.

        Returns:
            The chunks, in the order of the file.

        Raises:
            ArgumentError: the task has no such files.
            DataError: something is wrong with the file.

        Examples:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from klformer.lab.tasks import TASKS
            >>> task = TASKS["text"](TASKS["text"].data_config())
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = Path(folder) / "new.jsonl"
            ...     _ = path.write_text('{"text": "well done", "id": 7}')
            ...     chunks = list(task.read_inputs(path, keep=["id"], chunk=100))
            >>> chunks[0].rows, chunks[0].kept, chunks[0].sequences.lengths
            ([1], [(7,)], array([9]))
        """
        raise ArgumentError(f"{self.name} reads no inputs from other files: its sequences are made, not collected")

    def detail(self) -> str:
        """Return what tells this data from others of the same task in names and tables; nothing for most tasks."""
        return ""

    def label(self) -> str:
        """Return the task as tables and figures name it: its title with the detail."""
        return f"{self.title or self.name} {self.detail()}".strip()

    def prepare(self) -> None:  # noqa: B027 - most tasks have nothing to prepare
        """Make sure that generated data exists. With several processes, call it in one of them first."""

    def load(self, split: Split) -> Examples:
        """Load the examples of a split, after the protocol; a random subset where there are more than the limit.

        Args:
            split: "train", "validation" or "test".

        Raises:
            ArgumentError: there is no such split.
            DataError: data is missing or malformed.
        """
        check_choice("split", split, get_args(Split))
        if not self.in_memory and exists(self.root) and not is_folder(self.root):
            raise DataError("is no folder; data.root must be the folder that the data is in", file=self.root)
        examples = self._select(split)
        self._check_ids(split, examples)
        limit = self.config.limit(split)
        self._below_limit.pop(split, None)
        if limit is None or limit >= len(examples):
            if limit is not None and limit > len(examples):
                self._below_limit[split] = len(examples)
            return examples
        generator = np.random.default_rng((self.config.seed, _LIMIT_STREAM, get_args(Split).index(split)))
        return examples.take(np.sort(generator.permutation(len(examples))[:limit]))

    def validation_source(self) -> Literal["file", "train", "test"]:
        """Return what validation is made of: its own file, a part of train that is held out, or test."""
        return "test" if self.config.protocol == "lra" else "train"

    def test_source(self) -> Literal["file", "train"]:
        """Return what test is made of: its own file, or a part of train that is held out."""
        return "file"

    def describe_protocol(self) -> str:
        """Describe in one line what the model is selected on."""
        source = self.validation_source()
        if source == "test":
            return "validation on the test set (protocol lra)"
        part = f"{self._holdout_fraction():.0%} of the training set"
        validation = "validation set of the data"
        if source == "train":
            validation = f"validation on {part} (protocol {self.config.protocol})"
        test = "test set" if self.test_source() == "file" else f"test on {part} that are held out,"
        return f"{validation}; {test} used once, at the end"

    def is_official(self) -> bool:
        """Return whether the data is in the files that `official_sizes` speaks of."""
        return True

    def notes(self) -> list[str]:
        """Return notes for the user: a sentence for each part that was read and has another size than the official
        file, as it may be cut, for each split that has fewer examples than its limit, and whatever else a task finds
        worth saying of its files."""
        few = [
            f"{split} has {size:,} examples, fewer than {split}_limit {self.config.limit(split):,}; all are used"
            for split, size in self._below_limit.items()
        ]
        if not self.is_official():
            return few
        return few + [
            f"{part} has {size:,} examples, the official data {self.official_sizes[part]:,}: {self.location()}"
            for part, size in self.sizes.items()
            if part in self.official_sizes and size != self.official_sizes[part]
        ]

    def facts(self) -> dict[str, Any]:
        """Return what a result is to say of the data, as JSON."""
        return {}

    def further_tests(self) -> Mapping[str, Examples]:
        """Return more examples to evaluate on in the end, by the name that the result has them under; none for most
        tasks."""
        return {}

    def _holdout_fraction(self) -> float:
        return self.config.holdout_fraction

    def _select(self, split: Split) -> Examples:
        sources = {"train": "train", "validation": self.validation_source(), "test": self.test_source()}
        if sources[split] == "file":
            return self._read_part(split)
        if sources[split] == "test":
            return self._read_part("test")
        examples = self._read_part("train")
        held_out = [other for other in ("validation", "test") if sources[other] == "train"]
        if not held_out:
            return examples
        size = max(1, round(self._holdout_fraction() * len(examples)))
        if size * len(held_out) >= len(examples):
            raise DataError(
                f"{len(examples)} training examples are too few to hold out {size * len(held_out)} of them, "
                f"{len(held_out) + 1} are needed at least: {self.location()}"
            )
        # From the end: first validation, then test, and what is left is train.
        place = held_out.index(split) if split in held_out else len(held_out)
        end = len(examples) - size * place
        return self._cut(examples, end - size if split in held_out else 0, end)

    def _cut(self, examples: Examples, start: int, end: int) -> Examples:
        """Return a split's share of examples that are held out in part: a piece of a seeded random order."""
        order = np.random.default_rng((self.config.seed, _HOLDOUT_STREAM)).permutation(len(examples))
        if self.config.stratified and examples.targets.dtype == np.int64 and examples.targets.ndim == 1:
            # The examples of each class evenly spread, so that every piece has its share of them.
            place = np.zeros(len(order))
            for number in np.unique(examples.targets):
                (of_class,) = np.nonzero(examples.targets[order] == number)
                place[of_class] = (np.arange(len(of_class)) + 0.5) / len(of_class)
            order = order[np.argsort(place, kind="stable")]
        return examples.take(np.sort(order[start:end]))

    def _check_ids(self, split: Split, examples: Examples) -> None:
        size = self.shape().vocab_size
        for side in (examples.first, examples.second):
            if size is not None and side is not None and side.width is None and side.values.max(initial=0) >= size:
                raise DataError(
                    f"{split} of {self.name} has the token id {side.values.max()}; ids must be below {size}, the size "
                    "of the vocabulary"
                )

    def _read_part(self, part: Split) -> Examples:
        examples = self.read(part)
        self.sizes[part] = len(examples)
        return examples


class GeneratedTask(Task):
    """A task whose three parts are generated in memory, each from a stream of random numbers of its own."""

    is_generated: ClassVar[bool] = True
    in_memory: ClassVar[bool] = True
    data_config: ClassVar[type[DataConfig]] = GeneratedData
    default_num_examples: ClassVar[int]
    #: Examples of validation, and of test.
    held_out: ClassVar[int]

    config: GeneratedData

    @abstractmethod
    def _make(self, generator: np.random.Generator, count: int) -> Examples:
        """Return so many examples."""

    def validation_source(self) -> Literal["file", "train", "test"]:
        return "file"

    def describe_protocol(self) -> str:
        return "training, validation and test are generated apart; test set used once, at the end"

    def read(self, part: Split) -> Examples:
        count = (self.config.num_examples or self.default_num_examples) if part == "train" else self.held_out
        return self._make(np.random.default_rng((self.config.seed, get_args(Split).index(part))), count)
