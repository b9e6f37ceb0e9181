"""From the configuration of a run to its model."""

import torch
from torch import nn

from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.tasks import Task
from klformer.lab.training.objectives import MaskedLanguageModelling
from klformer.models import build_classifier, build_masked


def build_model(config: ExperimentConfig, task: Task) -> nn.Module:
    """The model of a run, with fresh weights from torch's global random state."""
    if (own := task.model(config.attention)) is not None:
        return own
    shape, objective = task.shape(), task.objective()
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
