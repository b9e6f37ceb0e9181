"""Presets: from a name, a task and an attention to a full configuration. What they set is the tasks' own.

A preset of a task is some of the settings of `ExperimentConfig`; what it leaves out has the default of its field.
"""

from typing import Any

from klformer.attention import attention_options
from klformer.errors import ArgumentError
from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.tasks import TASKS
from klformer.lab.tasks.presets import ANY, LAPTOP_DEFAULT, Preset
from klformer.models import AttentionSpec

#: What commands take if nothing is said.
DEFAULT_TASK, DEFAULT_ATTENTION, DEFAULT_PRESET = "sparsity", "gmm-rks", "laptop"


def preset_names(task: str) -> list[str]:
    """The presets of a task; `laptop` is one of them always."""
    return list({**TASKS[task].presets, DEFAULT_PRESET: None})


def preset_table(name: str, task: str) -> Preset:
    """What a preset of a task sets, by section."""
    TASKS.check(task)
    if name not in preset_names(task):
        raise ArgumentError(f"preset must be one of {', '.join(preset_names(task))}, got {name!r}, which {task} lacks")
    return TASKS[task].presets.get(name, LAPTOP_DEFAULT)


def preset(name: str, task: str, attention: AttentionSpec) -> ExperimentConfig:
    """The full configuration of a preset; options given with the attention replace those of the preset."""
    options = usual_options(name, task, attention.name) | attention.options
    nothing: dict[str, Any] = {"data": {}, "model": {}, "optimiser": {}, "schedule": {}, "training": {}}
    chosen = {"attention": {"name": attention.name, "options": options}}
    return ExperimentConfig.model_validate(
        {"task": task, "preset": name, **nothing, **preset_table(name, task), **chosen}
    )


def usual_options(name: str, task: str, attention: str) -> dict[str, Any]:
    """All options of an attention in a preset: its defaults, but for what the preset sets."""
    defaults, table = attention_options(attention), preset_table(name, task).get("attention", {})
    for_any = {key: value for key, value in table.get(ANY, {}).items() if key in defaults}
    return defaults | for_any | table.get(attention, {})
