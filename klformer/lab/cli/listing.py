"""`klformer list`: attentions with their options, tasks and presets, those of plugins too."""

from dataclasses import dataclass
from textwrap import wrap

from klformer.attention import AttentionSpec, attention_capabilities, attention_names, attention_options
from klformer.attention.registry import ATTENTIONS
from klformer.lab.cli.command import plain_command
from klformer.lab.runs.config import DEFAULT_ATTENTION, preset, preset_names
from klformer.lab.tables import Table
from klformer.lab.tasks import TASKS, task_names
from klformer.lab.terminal import make_console

#: Columns below which tables are of no use.
LEAST = 80


@dataclass(frozen=True)
class List:
    """List attentions with their options, tasks and presets."""


def list_all(options: List) -> None:
    """Print two tables, of attentions and of tasks; paragraphs where columns would be a few letters wide."""
    console = make_console(110)
    for title, lines in (("attentions", _attentions()), ("tasks", _tasks())):
        if console.width >= LEAST:
            Table.of(lines, title).print(console)
            continue
        for line in lines:
            text = f"{line['name']}: {'; '.join(list(line.values())[1:])}"
            for part in wrap(text, console.width, subsequent_indent="  ", break_on_hyphens=False):
                console.print(part, highlight=False, markup=False)


def _attentions() -> list[dict[str, str]]:
    lines = []
    for name in attention_names():
        options = ", ".join(f"{key}={value}" for key, value in attention_options(name).items())
        can = attention_capabilities(name)
        abilities = {"causal": can.causal, "cross": can.cross, "decoding": can.decoding, "weighted keys": can.key_bias}
        able = ", ".join(ability for ability, has in abilities.items() if has) or "-"
        line = {"name": name, "what it is": ATTENTIONS[name].summary, "time": can.cost, "can also be": able}
        lines.append(line | {"options and their defaults": options})
    return lines


def _tasks() -> list[dict[str, str]]:
    lines = []
    for name in task_names():
        presets = "\n".join(_describe(chosen, name) for chosen in preset_names(name))
        lines.append({"name": name, "what it is": TASKS[name].summary, "presets": presets})
    return lines


def _describe(preset_name: str, task: str) -> str:
    """Describe a preset of a task."""
    config = preset(preset_name, task, AttentionSpec(name=DEFAULT_ATTENTION))
    model, training = config.model, config.training
    length = f"{training.max_epochs} epochs" if training.max_steps is None else f"{training.max_steps:,} steps"
    layers = f"{model.num_layers} layers of {model.model_dim}"
    return f"{preset_name}: {layers}, {length} of {training.batch_size}"


COMMAND = plain_command(List, list_all)
