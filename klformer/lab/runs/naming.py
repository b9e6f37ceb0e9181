"""How runs, their attentions, their tasks and their results are called."""

import re
from collections.abc import Mapping
from typing import Any

from klformer.errors import ArgumentError
from klformer.lab.runs.config import ExperimentConfig, usual_options
from klformer.lab.runs.find import PASSED_OVER
from klformer.lab.training.metrics import Metric
from klformer.models import AttentionSpec

#: Ends the name of a setting whose runs start from pretrained weights.
PRETRAINED = "-pretrained"
#: The same of an encoder that learns, too.
FINETUNED = "-finetuned"


def check_name(name: str) -> str:
    """Return a name for a run's folder."""
    if name in PASSED_OVER or name.startswith(".") or not name.isprintable() or set(name) & {"/", "\\"} or not name:
        raise ArgumentError(
            f"--name must be the name of a folder, without / and not beginning with a dot, got {name!r}; --out says "
            "where it is"
        )
    return name


def attention_label(config: ExperimentConfig) -> str:
    """Return the attention with the options in which it differs from its preset."""
    usual = usual_options(config.preset, config.task, config.attention.name)
    options = {key: value for key, value in config.attention.options.items() if key not in usual or usual[key] != value}
    return AttentionSpec(name=config.attention.name, options=options).label()


def task_label(config: ExperimentConfig) -> str:
    """Return the task with what tells its data from others of the same task: `sparsity 0.5`."""
    return f"{config.task} {config.make_task().detail()}".strip()


def run_name(config: ExperimentConfig) -> str:
    """Return the default folder name: task, preset, attention and seed."""
    label = attention_label(config).replace(":", "-").replace(",", "-")
    return f"{setting_name(config)}-{label}{_start(config)}-seed{config.seed}"


def setting_and_start(config: ExperimentConfig) -> str:
    """Return task and preset, and whether weights were taken from another run: `sst2-laptop-pretrained`."""
    return f"{setting_name(config)}{_start(config)}"


def _start(config: ExperimentConfig) -> str:
    if config.encoder is not None and config.optimiser.encoder_learning_rate:
        return FINETUNED
    return PRETRAINED if config.init_from is not None or config.encoder is not None else ""


def setting_name(config: ExperimentConfig) -> str:
    """Return what the runs of a comparison have in common: task and preset."""
    name, _, detail = task_label(config).partition(" ")
    # A number follows its task at once, as in sparsity0.5; a word does not.
    space = "" if not detail or detail[0].isdigit() else "-"
    plain = re.sub(r"[^\w.-]+", "-", detail)
    return f"{name}{space}{plain}-{config.preset}"


def describe_score(metric: Metric, split: Mapping[str, Any]) -> str:
    """Describe the metric of a split of a result: mean, deviation over draws, and what the draws say together."""
    text = f"{metric.name} {metric.show(split[metric.name])}"
    if split["draws"] > 1:
        text += f" +- {metric.show_spread(split[f'{metric.name}_std'])} over {split['draws']} draws"
        what, value = combined_score(metric.name, split)
        text += f", {what} {metric.show(value)}"
    return text


def selecting_metric(result: Mapping[str, Any]) -> Metric:
    """Return the metric that a result was selected by."""
    return Metric(
        result["metric"], higher_is_better=result["metric_higher_is_better"], percent=result["metric_percent"]
    )


def combined_score(name: str, split: Mapping[str, Any]) -> tuple[str, float]:
    """Return what the draws of a split say together: a vote among classes, or another combination."""
    if f"voting_{name}" in split:
        return "vote", split[f"voting_{name}"]
    return "combined", split[f"combined_{name}"]
