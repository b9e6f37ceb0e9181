"""Gradients at the classifier under many draws of the frequencies (the paper's table on the sparsity task).

Of every example the gradient of its loss with regard to the hidden units of the classifier, before their activation.
For each unit the deviation and the mean of absolute values over examples and draws; then means over the units.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from klformer.kernels import resample
from klformer.models import SequenceClassifier
from klformer.models.reuse import first_part_once
from klformer.tasks import Batch
from klformer.training.evaluation import class_scores, evaluating
from klformer.training.seeds import generator_for


@dataclass(frozen=True)
class GradientStatistics:
    """Means over the hidden units."""

    deviation: float
    mean_absolute: float
    #: The part of the deviation that comes from the draws alone: within an example, over the draws.
    deviation_of_draws: float


@torch.no_grad()
def classifier_gradients(model: SequenceClassifier, batch: Batch, *, draws: int, seed: int) -> Tensor:
    """(draws, B, hidden units)."""
    hidden: list[Tensor] = []
    first, *rest = model.head
    handle = first.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    try:
        with evaluating(model), first_part_once(model) as next_pass:
            for draw in range(draws):
                next_pass()
                resample(model, generator_for(seed, "gradients", draw))
                class_scores(model, batch)
    finally:
        handle.remove()
    units = torch.stack(hidden)
    with torch.enable_grad():
        units.requires_grad_()
        scores = units
        for layer in rest:
            scores = layer(scores)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch.labels.repeat(draws), reduction="sum")
        return torch.autograd.grad(loss, units)[0]


def gradient_statistics(gradients: Tensor) -> GradientStatistics:
    """From (draws, B, units)."""
    flat = gradients.double().flatten(0, 1)
    of_draws = gradients.double().var(0, unbiased=False).mean(0).sqrt()
    return GradientStatistics(
        deviation=flat.std(0, unbiased=False).mean().item(),
        mean_absolute=flat.abs().mean().item(),
        deviation_of_draws=of_draws.mean().item(),
    )
