"""The whole description of an experiment, one frozen tree, as JSON; its presets, and the model that it makes."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, SerializeAsAny, ValidationError, ValidationInfo, field_validator
from torch import nn

from klformer.attention import attention_options
from klformer.config import Config, describe_problems
from klformer.errors import ArgumentError, RunError
from klformer.files import check_regular, parse_json
from klformer.lab.runs.encoder import PretrainedEncoder, build_encoder_classifier
from klformer.lab.tasks import TASKS, DataConfig, Task, build_task
from klformer.lab.tasks.presets import ANY, LAPTOP_DEFAULT, SECTIONS, Preset
from klformer.lab.tasks.pretraining import Pretraining
from klformer.lab.training.config import OptimiserConfig, ParallelConfig, ScheduleConfig, TrainingConfig
from klformer.lab.training.objectives import MaskedLanguageModelling
from klformer.models import AttentionSpec, ModelConfig, build_classifier, build_masked

#: Of run folders; a folder of another is refused by its number.
FORMAT: Literal[2] = 2


class ExperimentConfig(Config):
    """Everything that a run depends on."""

    format: Literal[2] = FORMAT
    task: str
    preset: str
    attention: AttentionSpec
    data: SerializeAsAny[DataConfig]
    model: ModelConfig
    optimiser: OptimiserConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    parallel: ParallelConfig = ParallelConfig()
    seed: int = Field(0, ge=0)
    objective: Literal["task", "masked"] = "task"
    """What is learned: the task, or hidden tokens of its sequences."""
    init_from: Path | None = None
    """The run whose embedding and encoder this one starts from."""
    encoder: PretrainedEncoder | None = None
    """The pretrained encoder that the model is built on."""

    @field_validator("task")
    @classmethod
    def _known(cls, name: str) -> str:
        return TASKS.check(name)

    @field_validator("attention")
    @classmethod
    def _complete(cls, attention: AttentionSpec) -> AttentionSpec:
        """Give the attention all its options: a default that changes later must not change a run that is loaded
        then."""
        return attention.complete()

    @field_validator("data", mode="before")
    @classmethod
    def _of_the_task(cls, data: Any, info: ValidationInfo) -> Any:
        """Make an instance of the task's own class."""
        if "task" not in info.data:  # which is wrong itself
            return data
        kind = TASKS[info.data["task"]].data_config
        if isinstance(data, DataConfig):
            if not isinstance(data, kind):
                raise ArgumentError(f"must be a {kind.__name__}, got a {type(data).__name__}")
            return data
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            raise ArgumentError(describe_problems(error)) from error

    def make_task(self, *, quiet: bool = False) -> Task:
        """Make the task, or the pretraining on its sequences."""
        task = build_task(self.task, self.data, quiet=quiet)
        return Pretraining(task) if self.objective == "masked" else task

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_file(path: Path) -> "ExperimentConfig":
        """Read what `to_json` wrote."""
        content = check_regular(path).read_bytes()
        with suppress(ValueError):  # which the next line says in its own words
            check_format(parse_json(content), path.parent)
        try:
            return ExperimentConfig.model_validate_json(content)
        except ValidationError as error:
            raise ArgumentError(f"{path}: {describe_problems(error)}") from error


def check_format(config: Any, folder: Path) -> None:
    """Look at a configuration that was read as JSON, before anything else of it is believed."""
    found = config.get("format", 1) if isinstance(config, dict) else FORMAT
    if found != FORMAT:
        raise RunError(
            f"{folder} has format {found}, this klformer reads format {FORMAT}; read it with the version that wrote "
            "it, or train it again"
        )


def build_model(config: ExperimentConfig, task: Task) -> nn.Module:
    """Build the model of a run, with fresh weights from torch's global random state."""
    if (own := task.model(config.attention)) is not None:
        return own
    shape, objective = task.shape(), task.objective()
    if config.encoder is not None:
        return build_encoder_classifier(config.encoder, config.model, config.optimiser, shape, objective)
    if isinstance(objective, MaskedLanguageModelling):
        return build_masked(config.model, config.attention, shape, counts=torch.from_numpy(objective.counts))
    return build_classifier(
        config.model,
        config.attention,
        shape,
        num_outputs=objective.num_outputs,
        of_positions=objective.of_positions,
        causal=task.is_causal,
    )


#: What replaces settings of a preset, by section: {"training": {"max_steps": 100}}.
Changes = Mapping[str, Mapping[str, Any]]
#: What commands take if nothing is said.
DEFAULT_TASK, DEFAULT_ATTENTION, DEFAULT_PRESET = "sparsity", "gmm-rks", "laptop"


def preset_names(task: str) -> list[str]:
    """Return the presets of a task; `laptop` is one of them always."""
    return list({**TASKS[task].presets, DEFAULT_PRESET: None})


def preset_table(name: str, task: str) -> Preset:
    """Return what a preset of a task sets, by section."""
    TASKS.check(task)
    if name not in preset_names(task):
        raise ArgumentError(f"preset must be one of {', '.join(preset_names(task))}, got {name!r}, which {task} lacks")
    return TASKS[task].presets.get(name, LAPTOP_DEFAULT)


def longest_in(name: str, task: str) -> int:
    """Return the longest sequence of a task in a preset."""
    return preset_table(name, task).get("data", {}).get("max_len") or TASKS[task].default_max_len


def preset(
    name: str,
    task: str,
    attention: AttentionSpec,
    changes: Changes | None = None,
    *,
    seed: int = 0,
    objective: Literal["task", "masked"] = "task",
    init_from: Path | None = None,
) -> ExperimentConfig:
    """Return the whole configuration of a preset, with some of its settings replaced.

    Args:
        name: The preset.
        task: Its task.
        attention: Its options replace those of the preset.
        changes: What replaces settings of the preset.
    """
    sections: dict[str, Any] = {**_merged(name, task, changes or {})}
    sections["attention"] = {"name": attention.name, "options": options_in(name, task, attention)}
    others = {"seed": seed, "objective": objective, "init_from": init_from}
    return ExperimentConfig.model_validate({"task": task, "preset": name, **sections, **others})


def preset_sections(name: str, task: str, changes: Changes) -> dict[str, Any]:
    """Return the sections of a preset but for its attention, each validated, with some settings replaced."""
    kinds: dict[str, type[Config]] = {
        "data": TASKS[task].data_config,
        "model": ModelConfig,
        "optimiser": OptimiserConfig,
    }
    kinds |= {"schedule": ScheduleConfig, "training": TrainingConfig}
    merged = _merged(name, task, changes)
    return {section: kind(**merged[section]) for section, kind in kinds.items()} | {"parallel": ParallelConfig()}


def _merged(name: str, task: str, changes: Changes) -> dict[str, dict[str, Any]]:
    table = preset_table(name, task)
    return {section: {**table.get(section, {}), **changes.get(section, {})} for section in SECTIONS}


def options_in(name: str, task: str, attention: AttentionSpec) -> dict[str, Any]:
    """Return all options of an attention in a preset; those that are given replace the preset's."""
    return usual_options(name, task, attention.name) | attention.options


def usual_options(name: str, task: str, attention: str) -> dict[str, Any]:
    """Return all options of an attention in a preset: its defaults, but for what the preset sets."""
    defaults, table = attention_options(attention), preset_table(name, task).get("attention", {})
    for_any = {key: value for key, value in table.get(ANY, {}).items() if key in defaults}
    return defaults | for_any | table.get(attention, {})
