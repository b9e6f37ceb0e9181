"""`klformer list`: attentions with their options, tasks and presets, those of plugins too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from klformer.attention import attention_names, attention_options, build_attention
from klformer.attention.base import ATTENTIONS
from klformer.cli.command import plain_command
from klformer.runs.presets import LAPTOP, PAPER, PRESETS
from klformer.tasks import TASKS, task_names


@dataclass(frozen=True)
class List:
    """List attentions with their options, tasks and presets."""


def run(options: List) -> None:
    """Print two tables, of attentions and of tasks."""
    console = Console(width=max(110, Console().width))
    console.print(_attentions())
    console.print(_tasks())


def _attentions() -> Table:
    table = Table(title="attentions", title_justify="left")
    for column in ("name", "what it is", "time", "can also be", "options and their defaults"):
        table.add_column(column)
    for name in attention_names():
        options = ", ".join(f"{key}={value}" for key, value in attention_options(name).items())
        mechanism = build_attention(name, num_heads=1, head_dim=2, max_len=4)
        abilities = {
            "causal": mechanism.supports_causal,
            "cross": mechanism.supports_cross,
            "decoding": mechanism.supports_decoding,
        }
        able = ", ".join(ability for ability, has in abilities.items() if has) or "-"
        table.add_row(name, ATTENTIONS[name].summary, mechanism.cost, able, options)
    return table


def _tasks() -> Table:
    table = Table(title="tasks", title_justify="left")
    for column in ("name", "what it is", *(f"preset {name}" for name in PRESETS)):
        table.add_column(column)
    for name in task_names():
        cells = [_describe(settings[name]) if name in settings else "-" for settings in (PAPER, LAPTOP)]
        table.add_row(name, TASKS[name].summary, *cells)
    return table


def _describe(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """A preset's settings for a task, in short."""
    model, training = settings["model"], settings["training"]
    length = f"{training['max_steps']:,} steps" if "max_steps" in training else f"{training['max_epochs']} epochs"
    return f"{model['num_layers']} layers of {model['model_dim']}, {length} of {training['batch_size']}"


COMMAND = plain_command(List, run)
