"""The tasks of GLUE, from the tree that its download script makes.

    glue_data/SST-2/{train,dev,test}.tsv   CoLA/  MRPC/  QQP/  STS-B/  MNLI/  QNLI/  RTE/  WNLI/

Files are tables between tabs without quoting. CoLA has no header in train and dev; MRPC begins with a byte order mark;
some rows of QQP are cut, and are left out. The labels of test are not public: dev is the test set here, and a part of
train is held out for validation, or dev is both with the protocol "lra". MNLI's second dev set is evaluated beside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import Field

from klformer.errors import DataError
from klformer.lab.data import Examples
from klformer.lab.tasks.base import Task
from klformer.lab.tasks.config import DataConfig, Split
from klformer.lab.tasks.files import first_existing
from klformer.lab.tasks.inputs import InputKind
from klformer.lab.tasks.own import RowsTask
from klformer.lab.tasks.presets import Preset, language_presets
from klformer.lab.tasks.registry import register_task
from klformer.lab.tasks.tables import Place, TableFormat, read_table
from klformer.lab.tasks.targets import Number, TargetKind
from klformer.lab.tokens import TokensConfig
from klformer.lab.training.objective import Objective
from klformer.lab.training.objectives import BinaryF1, Correlation, Matthews

#: The learning rates that are tried: the paper's, and fewer for a small model and few steps.
LEARNING_RATES: Mapping[str, tuple[float, ...]] = {
    "paper": (2e-3, 1e-4, 5e-4, 2e-5, 5e-6),
    "laptop": (3e-3, 1e-3),
}


class GlueData(DataConfig):
    """Where the tree is."""

    tokens: TokensConfig = Field(default_factory=lambda: TokensConfig(kind="wordpiece", vocab_size=4096))
    """How texts become sequences; those of the pretrained run, if weights are taken from one."""


PRESETS = language_presets(
    paper={
        "optimiser": {"learning_rate": 1e-4},
        "schedule": {"warmup_fraction": 0.1},
        "training": {"max_epochs": 10, "evaluate_every": 200, "checkpoint_every": 500},
    },
    laptop={
        "data": {"validation_limit": 1000, "test_limit": 2000},
        "optimiser": {"learning_rate": 3e-3},
        "schedule": {"warmup_fraction": 0.1},
        "training": {"max_epochs": 5, "max_steps": 1500, "evaluate_every": 100, "checkpoint_every": 500},
    },
)


@dataclass(frozen=True)
class Layout:
    """The files of a task.

    Args:
        folder: In the tree.
        texts: The columns of one or two texts.
        label: The column of the label.
        header: Names of the columns of train and dev, where these have no header.
        dev: Stem of the file to test on.
        may_be_cut: Rows with too few fields are left out.
    """

    folder: str
    texts: tuple[str, ...]
    label: str = "label"
    header: tuple[str, ...] = ()
    dev: str = "dev"
    may_be_cut: bool = False


class GlueTask(RowsTask):
    """A task of GLUE."""

    layout: ClassVar[Layout]
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    data_config: ClassVar[type[DataConfig]] = GlueData
    default_max_len: ClassVar[int] = 512
    #: What is learned, if it is more than accuracy.
    own_objective: ClassVar[Callable[[], Objective] | None] = None
    target: ClassVar[TargetKind] = "classes"

    config: GlueData

    def _set_up(self) -> None:
        super()._set_up()
        self._left_out: dict[str, int] = {}

    def location(self) -> str:
        folder = self._folder()
        if folder is None:
            return f"{self.root} (nothing found: {self.layout.folder}/train.tsv)"
        return str(folder)

    def kinds(self) -> tuple[InputKind, TargetKind, TokensConfig]:
        return "text", self.target, self.config.tokens

    def objective(self) -> Objective:
        make = type(self).own_objective
        return super().objective() if make is None else make()

    def describe_protocol(self) -> str:
        return super().describe_protocol().replace("test set", "test set (GLUE's dev)", 1)

    def notes(self) -> list[str]:
        left_out = [f"{count} cut rows of {name} are left out" for name, count in self._left_out.items() if count]
        return [*super().notes(), *left_out]

    def labelled(self, part: Split) -> Iterator[tuple[Place, tuple[Any, ...], Any]]:
        yield from self._rows(self.layout.dev if part == "test" else part)

    def unlabelled(self, path: Path, keep: Sequence[str]) -> Iterator[tuple[Place, tuple[Any, ...], tuple[Any, ...]]]:
        texts = self.layout.texts
        for place, fields in read_table(path, (*texts, *keep), TableFormat(delimiter="\t", quoted=False)):
            yield place, fields[: len(texts)], fields[len(texts) :]

    def _rows(self, stem: str) -> Iterator[tuple[Place, tuple[Any, ...], Any]]:
        folder, layout = self._folder(), self.layout
        if folder is None:
            raise DataError(
                f"has no {layout.folder}/train.tsv; --data.root must be the folder of GLUE's tree", file=self.root
            )
        path = folder / f"{stem}.tsv"
        written = TableFormat(delimiter="\t", quoted=False, column_names=layout.header)
        cut: list[int] = []
        for place, fields in read_table(path, (*layout.texts, layout.label), written, cut=cut):
            if layout.may_be_cut and not all(field.strip() for field in fields):
                cut.append(place.number)
            else:
                yield place, fields[:-1], fields[-1]
        if cut and not layout.may_be_cut:
            raise Place(path, cut[0]).error("has fewer fields between tabs than the header")
        self._left_out[path.name] = len(cut)

    def _folder(self) -> Path | None:
        name = self.layout.folder
        folders = (self.root / name, self.root / "glue_data" / name)
        found = first_existing(folder / "train.tsv" for folder in folders)
        return None if found is None else found.parent


_PAIR = ("sentence1", "sentence2")


class Sst2(GlueTask):
    name, title, summary = "sst2", "SST-2", "GLUE: sentiment of sentences from film reviews"
    layout = Layout("SST-2", ("sentence",))


class Mrpc(GlueTask):
    name, title, summary = "mrpc", "MRPC", "GLUE: do two sentences say the same"
    layout = Layout("MRPC", ("#1 String", "#2 String"), "Quality")
    own_objective = BinaryF1


class Qqp(GlueTask):
    name, title, summary = "qqp", "QQP", "GLUE: do two questions ask the same"
    layout = Layout("QQP", ("question1", "question2"), "is_duplicate", may_be_cut=True)
    own_objective = BinaryF1


class Mnli(GlueTask):
    name, title, summary = "mnli", "MNLI", "GLUE: does one sentence follow from the other, or contradict it"
    layout = Layout("MNLI", _PAIR, "gold_label", dev="dev_matched")

    def further_tests(self) -> Mapping[str, Examples]:
        """Return the dev set of other genres than those of train."""
        cells, labels = [], []
        for place, row, label in self._rows("dev_mismatched"):
            cells.append(self.parsed(place, row))
            labels.append(self.targets.encode(label))
        return {"mismatched": Examples(self.inputs.encode(cells, self.max_len), self.targets.as_array(labels))}


class Qnli(GlueTask):
    name, title, summary = "qnli", "QNLI", "GLUE: does a sentence answer the question"
    layout = Layout("QNLI", ("question", "sentence"))


class Wnli(GlueTask):
    name, title, summary = "wnli", "WNLI", "GLUE: what does a pronoun stand for"
    layout = Layout("WNLI", _PAIR)


class Rte(GlueTask):
    name, title, summary = "rte", "RTE", "GLUE: does one sentence follow from the other"
    layout = Layout("RTE", _PAIR)


class Cola(GlueTask):
    name, title, summary = "cola", "CoLA", "GLUE: is it a sentence of English"
    layout = Layout("CoLA", ("sentence",), header=("source", "label", "star", "sentence"))
    own_objective = Matthews

    def guess(self) -> float | None:
        return 0.0


class Stsb(GlueTask):
    name, title, summary = "stsb", "STS-B", "GLUE: how similar are two sentences, from 0 to 5"
    layout = Layout("STS-B", _PAIR, "score")
    target = "number"

    def objective(self) -> Objective:
        targets = self.targets
        assert isinstance(targets, Number)
        return Correlation(mean=targets.mean, scale=targets.scale)

    def guess(self) -> float | None:
        return 0.0


#: In the order of the paper's table.
GLUE_TASKS: Mapping[str, type[Task]] = MappingProxyType(
    {task.name: task for task in (Sst2, Mrpc, Qqp, Mnli, Qnli, Wnli, Rte, Cola, Stsb)}
)


def register_glue() -> None:
    """Make all of them known."""
    for task in GLUE_TASKS.values():
        register_task(task)
