"""`klformer list`: attentions with their options, tasks and presets."""

from rich.console import Console
from rich.table import Table

from klformer.attention import attention_names, attention_options, build_attention
from klformer.attention.base import ATTENTIONS
from klformer.runs.config import AttentionConfig
from klformer.runs.presets import DEFAULT_ATTENTION, preset, preset_names
from klformer.tasks import TASKS, task_names


def print_list() -> None:
    """Print two tables, of attentions and of tasks."""
    console = Console(width=max(110, Console().width))
    attentions = Table(title="attentions", title_justify="left")
    for column in ("name", "what it is", "time", "can also be", "options and their defaults"):
        attentions.add_column(column)
    for name in attention_names():
        options = ", ".join(f"{key}={value}" for key, value in attention_options(name).items())
        mechanism = build_attention(name, num_heads=1, head_dim=2, max_len=4)
        abilities = {
            "causal": mechanism.supports_causal,
            "cross": mechanism.supports_cross,
            "decoding": mechanism.supports_decoding,
        }
        able = ", ".join(ability for ability, has in abilities.items() if has) or "-"
        attentions.add_row(name, ATTENTIONS[name].summary, mechanism.cost, able, options)
    console.print(attentions)
    tasks = Table(title="tasks", title_justify="left")
    for column in ("name", "what it is", "presets"):
        tasks.add_column(column)
    for name in task_names():
        cells = []
        for chosen in preset_names(name):
            config = preset(chosen, name, AttentionConfig(name=DEFAULT_ATTENTION))
            model, training = config.model, config.training
            steps = training.max_steps
            length = f"{training.max_epochs} epochs" if steps is None else f"{steps:,} steps"
            layers = f"{model.num_layers} layers of {model.model_dim}"
            cells.append(f"{chosen}: {layers}, {length} of {training.batch_size}")
        tasks.add_row(name, TASKS[name].summary, "\n".join(cells))
    console.print(tasks)
