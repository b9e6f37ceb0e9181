"""What `train` and `compare` have in common: settings that a preset gives and any flag can replace.

The defaults depend on task and preset. These are looked for in the arguments first; tyro then reads all arguments with
the preset as defaults. The options of `--data` are those of the task's own data configuration, because tyro takes the
type of a default that is more special than the annotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from klformer.lab.cli.command import peek, read_options
from klformer.lab.runs.config import (
    DEFAULT_PRESET,
    DEFAULT_TASK,
    Changes,
    ExperimentConfig,
    longest_in,
    options_in,
    preset_sections,
)
from klformer.lab.runs.encoder import PretrainedEncoder, settings_to_build_on
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.init_from import settings_to_start_from
from klformer.lab.tasks import DataConfig
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

    def resolve(
        self,
        attention: AttentionSpec,
        seed: int,
        *,
        objective: Literal["task", "masked"] = "task",
        init_from: Path | None = None,
        encoder: PretrainedEncoder | None = None,
    ) -> ExperimentConfig:
        """Return the configuration of a run: the one place where words of a command line become one."""
        sections = {section.name: getattr(self, section.name) for section in fields(Sections)}
        sections["data"] = self.data.absolute()
        options = options_in(self.preset, self.task, attention)
        return ExperimentConfig(
            task=self.task,
            preset=self.preset,
            attention=AttentionSpec(name=attention.name, options=options),
            seed=seed,
            objective=objective,
            init_from=init_from,
            encoder=encoder,
            **sections,
        )


Chosen = TypeVar("Chosen", bound=Settings)


def read_settings(
    command: type[Chosen],
    arguments: Sequence[str],
    prog: str,
    *,
    resumed: ExperimentConfig | None = None,
    default_task: str = DEFAULT_TASK,
) -> Chosen:
    """Read the arguments of a command, with the settings of task and preset as defaults, or those of a run.

    Args:
        resumed: The run, if it is one that goes on.
        default_task: The task, if the arguments name none.
    """
    own: dict[str, Any] = {}
    if resumed is not None:
        task, preset = resumed.task, resumed.preset
        sections = {section.name: getattr(resumed, section.name) for section in fields(Sections)}
        own = {"attention": resumed.attention.label(), "seed": resumed.seed, "init_from": resumed.init_from}
        own |= {} if resumed.encoder is None else {"encoder": resumed.encoder.folder}
    else:
        peeked = peek(arguments, task=default_task, preset=DEFAULT_PRESET, encoder=None, **{"init-from": None})
        task, preset = peeked.task, peeked.preset
        changes: Changes = {}
        if peeked.init_from is not None:
            source = RunFolder(Path(peeked.init_from).expanduser()).config()
            changes = settings_to_start_from(source, preset, task)
            own = {"attention": source.attention.label()}
        if peeked.encoder is not None and Path(peeked.encoder).expanduser().exists():
            attention, changes = settings_to_build_on(Path(peeked.encoder), longest_in(preset, task))
            own = {"attention": attention.complete().label(), "encoder": Path(peeked.encoder)}
        sections = preset_sections(preset, task, changes)
    return read_options(command, arguments, prog, default=command(task=task, preset=preset, **sections, **own))
