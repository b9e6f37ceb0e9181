"""From the configuration of a run to its model."""

from torch import nn

from klformer.models import build_classifier
from klformer.runs.config import ExperimentConfig
from klformer.tasks import Task


def build_model(config: ExperimentConfig, task: Task) -> nn.Module:
    """The classifier of a run, with fresh weights from torch's global random state."""
    objective = task.objective()
    return build_classifier(
        config.model,
        config.attention,
        vocab_size=task.vocab_size,
        input_dim=task.input_dim,
        max_len=task.max_len,
        num_outputs=objective.num_outputs,
        is_pair=task.is_pair,
        of_positions=objective.of_positions,
        causal=task.is_causal,
    )
