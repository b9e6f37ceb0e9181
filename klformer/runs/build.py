"""From the configuration of a run to its model."""

from torch import nn

from klformer.models import build_classifier
from klformer.runs.config import ExperimentConfig
from klformer.tasks import Task


def build_model(config: ExperimentConfig, task: Task) -> nn.Module:
    """The classifier of a run, with fresh weights from torch's global random state."""
    shape, objective = task.shape(), task.objective()
    return build_classifier(
        config.model,
        config.attention,
        vocab_size=shape.vocab_size,
        input_dim=shape.input_dim,
        max_len=shape.max_len,
        num_outputs=objective.num_outputs,
        is_pair=shape.is_pair,
        separator=shape.separator,
        of_positions=objective.of_positions,
        causal=task.is_causal,
    )
