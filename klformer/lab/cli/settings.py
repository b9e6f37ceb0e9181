"""What `train` and `compare` have in common: settings that a preset gives and any flag can replace.

The defaults depend on task and preset. These are looked for in the arguments first; tyro then reads all arguments with
the preset as defaults. The options of `--data` are those of the task's own data configuration, because tyro takes the
type of a default that is more special than the annotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from klformer.lab.cli.command import peek, read_options
from klformer.lab.runs.config import (
    DEFAULT_ATTENTION,
    DEFAULT_PRESET,
    DEFAULT_TASK,
    ExperimentConfig,
    preset,
    usual_options,
)
from klformer.lab.runs.encoder import usual_settings
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.init_from import SAME
from klformer.lab.tasks import TASKS, DataConfig
from klformer.lab.training.config import OptimiserConfig, ParallelConfig, ScheduleConfig, TrainingConfig
from klformer.models import AttentionSpec, ModelConfig

DEFAULT_OUT = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The parts of a configuration that flags with a dot replace."""

    data: DataConfig
    model: ModelConfig
    optimiser: OptimiserConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    parallel: ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Settings(Sections):
    """The options of every command that trains."""

    task: str = DEFAULT_TASK
    """Task; `klformer list` names them."""
    preset: str = "laptop"
    """paper: the paper's tables. laptop: the same tasks for two cores and some minutes. workstation: the tasks of Long
    Range Arena at their own lengths, for half an hour of one core."""
    out: Path = DEFAULT_OUT
    """Folder for runs."""
    quiet: bool = False
    """Say nothing but errors; `compare` still prints its table."""

    def experiment(self, attention: AttentionSpec, seed: int) -> ExperimentConfig:
        """The full configuration; options of the attention that were not given are the preset's."""
        sections = {section.name: getattr(self, section.name) for section in fields(Sections)}
        sections["data"] = self.data.absolute()
        options = usual_options(self.preset, self.task, attention.name) | attention.options
        return ExperimentConfig(
            task=self.task,
            preset=self.preset,
            attention=AttentionSpec(name=attention.name, options=options),
            seed=seed,
            **sections,
        )


Chosen = TypeVar("Chosen", bound=Settings)


def parse_settings(
    command: type[Chosen],
    arguments: Sequence[str],
    prog: str,
    *,
    start: ExperimentConfig | None = None,
    default_task: str = DEFAULT_TASK,
) -> Chosen:
    """Read the arguments of a command, with the settings of task and preset as defaults, or those of a run.

    Args:
        start: The run, if it is one that goes on.
        default_task: The task, if the arguments name none.
    """
    own: dict[str, Any] = {}
    if start is None:
        peeked = peek(arguments, task=default_task, preset=DEFAULT_PRESET, encoder=None, **{"init-from": None})
        usual = preset(peeked.preset, peeked.task, AttentionSpec(name=DEFAULT_ATTENTION))
        if peeked.init_from is not None:
            usual = _started_from(usual, RunFolder(Path(peeked.init_from).expanduser()).config())
            own = {"attention": usual.attention.label()}
        if peeked.encoder is not None and Path(peeked.encoder).expanduser().exists():
            usual = _built_on(usual, Path(peeked.encoder))
            own = {"attention": usual.attention.label(), "encoder": Path(peeked.encoder)}
    else:
        usual = start
        own = {"attention": start.attention.label(), "seed": start.seed, "init_from": start.init_from}
        own |= {} if start.encoder is None else {"encoder": start.encoder.folder}
    sections = {section.name: getattr(usual, section.name) for section in fields(Sections)}
    default = command(task=usual.task, preset=usual.preset, **sections, **own)
    return read_options(command, arguments, prog, default=default)


def _started_from(usual: ExperimentConfig, source: ExperimentConfig) -> ExperimentConfig:
    """The settings of a preset with the model and the attention of a run to start from, and no longer sequences."""
    model = usual.model.model_copy(update={name: getattr(source.model, name) for name in SAME})
    longest = [
        data.max_len or TASKS[task].default_max_len
        for task, data in ((usual.task, usual.data), (source.task, source.data))
    ]
    data = usual.data.model_copy(update={"max_len": min(longest)})
    return usual.model_copy(update={"model": model, "attention": source.attention, "data": data})


def _built_on(usual: ExperimentConfig, encoder: Path) -> ExperimentConfig:
    """The settings of a preset with the attention and the pooling of an encoder, and no longer texts than it reads."""
    attention, pooling, longest = usual_settings(encoder)
    model = usual.model.model_copy(update={"pooling": pooling})
    max_len = usual.data.max_len or TASKS[usual.task].default_max_len
    data = usual.data.model_copy(update={"max_len": min(max_len, longest or max_len)})
    return usual.model_copy(update={"model": model, "attention": attention.complete(), "data": data})
