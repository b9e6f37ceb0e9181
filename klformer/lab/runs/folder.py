"""The folder of a run: the one place that knows what it is made of.

    runs/<name>/   config.json  task.json  knowledge.json  data.json  metrics.jsonl  tensorboard/  initial.safetensors
                   checkpoints/  result.json

config.json is written when data and model are there, just before the first step: what fails earlier leaves no run. It
begins with the number of the format. task.json says what a reader must know of a task that it may not have;
knowledge.json has what the task found in its data: names of classes, tokens, sizes.
Everything later (evaluation, comparison, analysis, reports) reads such folders and nothing else.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError
from torch import Tensor

from klformer.config import Config, describe_problems
from klformer.errors import RunError
from klformer.files import check_regular, parse_json, read_json, replacing, write_json, write_text
from klformer.lab.data import Examples
from klformer.lab.runs.changes import MAY_CHANGE, changes
from klformer.lab.runs.config import ExperimentConfig, check_format
from klformer.lab.tasks import Split, Task
from klformer.lab.tasks.base import Knowledge
from klformer.lab.training.checkpoint import CheckpointStore, read_weights, save_tensors
from klformer.lab.training.log import MetricsLog, read_lines
from klformer.lab.training.metrics import Metric

#: What file systems without locks for folders say, as those of some networks are.
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}


class TaskFacts(Config):
    """What a reader must know of a task that it may not have."""

    name: str
    """On the command line."""
    title: str
    """In tables and figures."""
    label: str
    """The title with what tells this data from others of the task."""
    chance: float | None
    """The selecting metric of guessing."""
    metric: Metric
    """The one that selects."""
    classes: tuple[str, ...] = ()
    """Their names, in the order of their numbers, where they have names."""

    @staticmethod
    def of(task: Task) -> "TaskFacts":
        """Return the facts of a task."""
        return TaskFacts(
            name=task.name,
            title=task.title or task.name,
            label=task.label(),
            chance=task.guess(),
            metric=task.objective().selecting,
            classes=task.class_names() or (),
        )


class RunFolder:
    """The files of a run."""

    CONFIG: ClassVar[str] = "config.json"
    TASK: ClassVar[str] = "task.json"
    KNOWLEDGE: ClassVar[str] = "knowledge.json"
    DATA: ClassVar[str] = "data.json"
    METRICS: ClassVar[str] = "metrics.jsonl"
    TENSORBOARD: ClassVar[str] = "tensorboard"
    INITIAL: ClassVar[str] = "initial.safetensors"
    CHECKPOINTS: ClassVar[str] = "checkpoints"
    RESULT: ClassVar[str] = "result.json"
    #: What a run tells, without its weights.
    RECORD: ClassVar[tuple[str, ...]] = (CONFIG, TASK, KNOWLEDGE, DATA, METRICS, RESULT)
    #: Folders inside, in which there are no other runs.
    SUBFOLDERS: ClassVar[frozenset[str]] = frozenset({TENSORBOARD, CHECKPOINTS})

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def is_run(self) -> bool:
        """Return whether the folder holds a run."""
        return (self.path / self.CONFIG).is_file()

    def check_place(self) -> None:
        """See that the folder can be made, before anything long is done."""
        above = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise RunError(f"can't write to {self.path}: {above} is no folder that can be written")

    @contextmanager
    def claims(self) -> Iterator[Callable[[], None]]:
        """Give a function that makes the folder and keeps others out of it until the end, and can be called twice.

        A folder that was made and has not become a run's by the end is removed again. The function raises RunError if
        the folder can't be written, or somebody else is training in it.
        """
        with ExitStack() as until_end:
            claimed = False

            def claim() -> None:
                nonlocal claimed
                if claimed:
                    return
                self.check_place()
                if not self.path.exists():
                    until_end.callback(self._remove_unless_run)
                try:
                    self.path.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise RunError(f"can't write to {self.path}: {error.strerror or error}") from error
                until_end.enter_context(self.only_process())
                claimed = True

            yield claim

    def _remove_unless_run(self) -> None:
        """Remove a folder in which nothing but the beginning of a run was written."""
        if self.is_run():
            return
        for name in (self.INITIAL, self.DATA, self.TASK, self.KNOWLEDGE):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # somebody else has put something there
            self.path.rmdir()

    @contextmanager
    def only_process(self) -> Iterator[None]:
        """Keep others from training in the same folder meanwhile, where the file system has locks."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise RunError(f"another process is training in {self}; wait for it, or give another --name") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
        try:
            yield
        finally:
            os.close(descriptor)

    def config(self) -> ExperimentConfig:
        """Return the configuration."""
        self._check_is_run()
        return ExperimentConfig.from_file(self.path / self.CONFIG)

    def config_json(self) -> dict[str, Any]:
        """Return the configuration as it was written, also of a task or an attention that is not known here."""
        self._check_is_run()
        content = read_json(self.path / self.CONFIG)
        check_format(content, self.path)
        return content

    def config_so_far(self, config: ExperimentConfig, *, resume: bool) -> ExperimentConfig | None:
        """Return the configuration of the run that the folder holds, if any, for one that goes on as `config`."""
        if not (self.path / self.CONFIG).exists():
            return None
        if not resume:
            raise RunError(f"{self} holds a run already; --resume goes on with it, --name makes another")
        before = self.config()
        changed = [change for key, change in changes(before, config).items() if key not in MAY_CHANGE]
        if changed:
            raise RunError(
                f"{self} was started with another configuration: {'; '.join(changed)}. Another --name or "
                "--out makes another run; `compare --sweep FIELD=A,B` makes one for every value"
            )
        return before

    def task_facts(self) -> TaskFacts:
        """Return what there is to know of the task."""
        try:
            return TaskFacts.model_validate(read_json(self.path / self.TASK))
        except ValidationError as error:
            raise RunError(f"{self.path / self.TASK} is damaged: {describe_problems(error)}") from error

    def knowledge(self) -> Knowledge:
        """Return what the task found in the data of the run; nothing if there is no such file."""
        path = self.path / self.KNOWLEDGE
        return read_json(path) if path.exists() else {}

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of the record, of one kind ("train" or "validation") or all."""
        lines = read_lines(self.path / self.METRICS)
        return [line for line in lines if kind is None or line["kind"] == kind]

    def result(self) -> dict[str, Any] | None:
        """Return the result; None if the run is not finished."""
        return read_json(self.path / self.RESULT) if (self.path / self.RESULT).exists() else None

    def initial_weights(self) -> dict[str, Tensor]:
        """Return the weights that the run started from."""
        return read_weights(self.path / self.INITIAL)

    def checkpoints(self, say: Callable[[str], None]) -> CheckpointStore:
        """Return the checkpoints; `say` is told about those that had to be passed over."""
        return CheckpointStore(self.path / self.CHECKPOINTS, say)

    def open_log(self, step: int) -> MetricsLog:
        """Open the record, to go on with after a step."""
        return MetricsLog(self.path / self.METRICS, self.path / self.TENSORBOARD, step=step)

    def write_initial(self, weights: Mapping[str, Tensor], before: ExperimentConfig | None) -> None:
        """Keep the weights that a run starts from; those of a run that goes on are there already."""
        path = self.path / self.INITIAL
        if before is None or not path.exists():
            with replacing(path) as temporary:
                save_tensors(weights, temporary)

    def write_beginning(
        self,
        config: ExperimentConfig,
        before: ExperimentConfig | None,
        task: Task,
        knowledge: Knowledge,
        splits: Mapping[Split, Examples],
    ) -> None:
        """Write what the run is made of; the configuration last, which makes the folder a run's."""
        if before is not None:
            self.check_same_data(splits)
        self._write_json(self.DATA, {split: _fingerprint(examples) for split, examples in splits.items()})
        self._write_json(self.TASK, TaskFacts.of(task).model_dump(mode="json"))
        self._write_json(self.KNOWLEDGE, knowledge)
        if before != config:
            # A result of fewer steps is not that of the run that now goes on.
            (self.path / self.RESULT).unlink(missing_ok=True)
            write_text(self.path / self.CONFIG, config.to_json())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result, which makes the run a finished one."""
        self._write_json(self.RESULT, result)

    def check_same_data(self, splits: Mapping[Split, Examples]) -> None:
        """Compare data with that of the run; a run without a record of it is taken at its word."""
        path = self.path / self.DATA
        if not path.exists():
            return
        try:
            recorded = parse_json(check_regular(path).read_bytes())
            pairs = {split: (_sizes(recorded[split]), _sizes(_fingerprint(splits[split]))) for split in splits}
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{path} is damaged; remove it to go on without a check that the data is the same"
            ) from error
        changed = [f"{split} was {was}, is {now}" for split, (was, now) in pairs.items() if was != now]
        if changed:
            raise RunError(f"{self} was started with other data: {'; '.join(changed)}")

    def _check_is_run(self) -> None:
        if not self.path.exists():
            raise RunError(f"there is no folder {self}")
        if not self.is_run():
            raise RunError(f"{self} is not a run: it has no {self.CONFIG}")

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_json(self.path / name, content)


def _fingerprint(examples: Examples) -> dict[str, Any]:
    return {"examples": len(examples), "sha256": examples.fingerprint()}


def _sizes(split: Mapping[str, Any]) -> str:
    return f"{split['examples']:,} examples (sha256 {split['sha256'][:12]})"


#: What of the environment tables of runs have.
_ENVIRONMENT = ("date", "processor", "threads", "torch", "klformer")


def what_it_took(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return steps, tokens and seconds of a run, and when, where and with which versions, from its result.json.

    Older runs do not know the seconds of processors; theirs are None.
    """
    processor = result.get("train_processor_seconds")
    return {
        "steps": result["steps"],
        "best_step": result["best_step"],
        "train_tokens": result["train_tokens"],
        "train_seconds": round(result["train_seconds"], 1),
        "train_processor_seconds": None if processor is None else round(processor, 1),
        **{name: result["environment"][name] for name in _ENVIRONMENT},
    }
