"""How runs, their attentions and their tasks are called."""

from typing import Any

from klformer.models import AttentionSpec
from klformer.runs.config import ExperimentConfig
from klformer.runs.presets import usual_options


def attention_label(config: ExperimentConfig) -> str:
    """The attention with the options in which it differs from its preset."""
    usual = usual_options(config.preset, config.task, config.attention.name)
    options = {key: value for key, value in config.attention.options.items() if key not in usual or usual[key] != value}
    return AttentionSpec(name=config.attention.name, options=options).label()


def task_label(task: str, sparsity: float | None) -> str:
    """The task as tables name it: that of sparsity with its p, if it is known, because each p is a task of its own."""
    return f"{task} {sparsity:g}" if task == "sparsity" and sparsity is not None else task


def run_name(config: ExperimentConfig) -> str:
    """The default folder name: task, preset, attention and seed."""
    label = attention_label(config).replace(":", "-").replace(",", "-")
    return f"{setting_name(config)}-{label}-seed{config.seed}"


def setting_name(config: ExperimentConfig) -> str:
    """What the runs of a comparison have in common: task and preset."""
    task = task_label(config.task, config.data.sparsity).replace(" ", "")
    return f"{task}-{config.preset}"


def describe_accuracy(result: dict[str, Any]) -> str:
    """Mean, deviation over draws, and vote, in percent."""
    text = f"{100 * result['accuracy']:.2f}%"
    if result["draws"] > 1:
        text += f" +- {100 * result['accuracy_std']:.2f} over {result['draws']} draws"
        text += f", vote {100 * result['voting_accuracy']:.2f}%"
    return text
