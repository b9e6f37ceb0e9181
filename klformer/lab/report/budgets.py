"""What runs were given, in a sentence: steps, lengths and the size of the model; and what the paper gave."""

from collections.abc import Mapping
from typing import Any

from klformer.lab.runs.presets import preset_table
from klformer.lab.tables import finite
from klformer.lab.tasks import TASKS


def describe_budget(config: Mapping[str, Any]) -> str:
    """Steps, batch, length and model, from a flat configuration; a length that is not set is the task's own."""

    def number(key: str) -> str:
        value = finite(config.get(key))
        return "?" if value is None else f"{value:,}"

    steps = finite(config.get("training.max_steps"))
    length = f"{steps:,} steps" if steps is not None else f"{number('training.max_epochs')} epochs"
    task = str(config.get("task"))
    usual = TASKS[task].default_max_len if task in TASKS else None
    tokens = finite(config.get("data.max_len")) or usual
    layers = "1 layer" if config.get("model.num_layers") == 1 else f"{number('model.num_layers')} layers"
    return (
        f"{length} of {number('training.batch_size')} sequences"
        + (f" of at most {tokens:,} tokens" if tokens is not None else "")
        + f", {layers} of width {number('model.model_dim')}"
    )


def paper_budget(task: str) -> str | None:
    """The paper's own budget for a task, from its table of hyper-parameters."""
    lengths = {"listops": 2000, "text": 4000, "retrieval": 4000, "image": 1024}
    if task not in lengths:
        return None
    table = preset_table("paper", task)
    flat = {f"{section}.{key}": value for section in ("model", "training") for key, value in table[section].items()}
    return describe_budget(flat | {"data.max_len": lengths[task]})
