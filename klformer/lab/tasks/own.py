"""Tasks that read labelled rows and find everything else in them: classes and their names, tokens, scales.

What is found is learned from the training rows once and remembered with a run, so that the run reads other rows, and
rows without labels, in the same way for ever.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from klformer.errors import DataError, RunError
from klformer.lab.data import Examples, InputShape
from klformer.lab.tasks.base import InputChunk, Knowledge, Task
from klformer.lab.tasks.config import Split
from klformer.lab.tasks.inputs import KINDS, InputKind, Inputs, chunks_of_rows, inputs_from_json, learn_inputs
from klformer.lab.tasks.tables import Place
from klformer.lab.tasks.targets import TargetKind, Targets, label_text, learn_targets, targets_from_json
from klformer.lab.tokens import TokensConfig
from klformer.lab.training.objective import Objective

#: A row of so many lines is longer than most; somebody is to look at it.
MANY_LINES = 10


class OwnFiles(Task):
    """A task whose parts are files of the user's own; those that are not there are held out of train."""

    @abstractmethod
    def _has(self, part: Split) -> bool:
        """Return whether a part has files of its own."""

    def validation_source(self) -> Literal["file", "train", "test"]:
        return "file" if self._has("validation") else "train"

    def test_source(self) -> Literal["file", "train"]:
        return "file" if self._has("test") else "train"


class LabelledTask(Task):
    """A task that finds its classes, or the scale of its numbers, in the labels of its training data."""

    #: What a run must remember of its data.
    remembered: ClassVar[tuple[str, ...]] = ("targets",)

    def _set_up(self) -> None:
        self._targets: Targets | None = None

    def know(self, knowledge: Knowledge) -> None:
        if missing := [name for name in self.remembered if name not in knowledge]:
            raise RunError(f"what the run remembers of its data is missing: knowledge.json has no {missing[0]}")
        self._targets = targets_from_json(knowledge["targets"])

    @property
    def targets(self) -> Targets:
        """How labels become targets."""
        if self._targets is None:
            self.know(self.learn())
        assert self._targets is not None
        return self._targets

    def objective(self) -> Objective:
        return self.targets.objective()

    def class_names(self) -> tuple[str, ...] | None:
        return self.targets.names

    def guess(self) -> float | None:
        return self.targets.guess


class RowsTask(LabelledTask):
    """A task made of rows of cells with a label each."""

    remembered: ClassVar[tuple[str, ...]] = ("inputs", "targets")

    def _set_up(self) -> None:
        super()._set_up()
        self._inputs: Inputs | None = None
        self._adopted: Knowledge = {}
        # Rows that span many lines, and how many: a stray quote may have made them.
        self._long: dict[tuple[Path, int], int] = {}
        # Rows that lack something, by the file.
        self._incomplete: dict[Path, set[int]] = {}
        # The last part that was read, which train, validation and test may all be parts of.
        self._last: tuple[Split, Examples] | None = None

    @abstractmethod
    def labelled(self, part: Split) -> Iterator[tuple[Place, tuple[Any, ...], Any]]:
        """Yield the rows of a part.

        Args:
            part: "train", "validation" or "test".

        Returns:
            For each row where it is, its cells, and its label.

        Raises:
            DataError: the file is missing or malformed.
        """

    @abstractmethod
    def unlabelled(self, path: Path, keep: Sequence[str]) -> Iterator[tuple[Place, tuple[Any, ...], tuple[Any, ...]]]:
        """Yield the rows of any file, whether they have labels or not.

        Args:
            path: The file.
            keep: Columns whose fields are passed on.

        Returns:
            For each row where it is, its cells, and the fields of the columns to keep.
        """

    @abstractmethod
    def kinds(self) -> tuple[InputKind, TargetKind, TokensConfig]:
        """Return what inputs and targets are.

        Returns:
            The kind of the inputs, the kind of the targets, and how texts become sequences.
        """

    def adopt(self, knowledge: Knowledge) -> None:
        self._adopted = knowledge.get("inputs", {})

    def learn(self) -> Knowledge:
        place, cells, labels = self._parsed("train")
        input_kind, target_kind, tokens = self.kinds()
        try:
            targets = learn_targets(target_kind, labels)
        except ValueError as error:
            raise DataError(f"the column of labels {error}", file=place.path) from error
        if self._adopted and self._adopted.get("kind") == input_kind:
            return {"inputs": self._adopted, "targets": targets.as_json()}
        try:
            inputs = learn_inputs(input_kind, cells, tokens)
        except ValueError as error:
            raise DataError(f"the column of inputs {error}", file=place.path) from error
        return {"inputs": inputs.as_json(), "targets": targets.as_json()}

    def know(self, knowledge: Knowledge) -> None:
        super().know(knowledge)
        self._inputs = inputs_from_json(knowledge["inputs"])

    @property
    def inputs(self) -> Inputs:
        """How cells become sequences."""
        if self._inputs is None:
            self.know(self.learn())
        assert self._inputs is not None
        return self._inputs

    def shape(self) -> InputShape:
        return self.inputs.shape(self.max_len)

    def read(self, part: Split) -> Examples:
        if self._last is not None and self._last[0] == part:
            return self._last[1]
        encode = self.targets.encode
        _, cells, labels = self._parsed(part, check=encode)
        examples = Examples(
            self.inputs.encode(cells, self.max_len), self.targets.as_array([encode(label) for label in labels])
        )
        self._last = (part, examples)
        return examples

    def read_inputs(self, path: Path, *, keep: Sequence[str], chunk: int) -> Iterator[InputChunk]:
        rows = ((place, self.parsed(place, row), fields) for place, row, fields in self.unlabelled(path, keep))
        return chunks_of_rows(rows, chunk, lambda cells: self.inputs.encode(cells, self.max_len))

    def parsed(self, place: Place, cells: Sequence[Any]) -> Any:
        """Parse the cells of a row, as inputs take them.

        Args:
            place: Where the row is, for errors.
            cells: Its fields, one for each column of inputs.
        """
        if place.lines > MANY_LINES:
            self._long[place.path, place.number] = place.lines
        with located(place):
            return KINDS[self.kinds()[0]].parse(cells)

    def notes(self) -> list[str]:
        """Add the longest row of each file that has very long ones."""
        longest = {
            path: (lines, number) for (path, number), lines in sorted(self._long.items(), key=lambda row: row[1])
        }
        return super().notes() + [
            f"the row in line {number} of {path.name} spans {lines} lines; if a stray quote has swallowed rows, "
            "--data.no-quoted takes quotes as text"
            for path, (lines, number) in longest.items()
        ]

    def _parsed(self, part: Split, check: Any = None) -> tuple[Place, list[Any], list[str]]:
        """Return where the last row of a part is, and all cells and labels; each label is shown to `check`."""
        cells, labels, last = [], [], None
        for place, row, label in self.labelled(part):
            cells.append(self.parsed(place, row))
            with located(place):
                labels.append(label_text(label))
                if check is not None:
                    check(labels[-1])
            last = place
        if last is None:
            raise DataError(f"{part} has no rows: {self.location()}")
        return last, cells, labels


@contextmanager
def located(place: Place) -> Iterator[None]:
    """Turns a ValueError about a row into a DataError that says where the row is."""
    try:
        yield
    except ValueError as error:
        raise place.error(str(error)) from error
