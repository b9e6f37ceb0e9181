"""Gradients at the classifier under many draws of the frequencies (the paper's table on the sparsity task).

Of every example the gradient of its loss with regard to the hidden units of the classifier, before their activation.
For each unit the deviation and the mean of absolute values; then means over the units. "We pass the first 50 validation
datapoints and record the gradients ... repeated 50 times" can be read in two ways, and both are here:

    per pass      one value a draw: the gradient of the mean loss of all examples
    per example   one value a draw and example: those of all examples are pooled
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.lab.data import Batch
from klformer.lab.training.evaluation import evaluating, model_outputs
from klformer.lab.training.objectives import cross_entropy
from klformer.lab.training.reuse import first_part_once
from klformer.lab.training.seeds import generator_for
from klformer.models import SequenceClassifier
from klformer.noise import resample


@dataclass(frozen=True)
class GradientStatistics:
    """Means over the hidden units."""

    per_pass_deviation: float
    per_pass_mean_absolute: float
    per_example_deviation: float
    per_example_mean_absolute: float
    #: The part of the deviation per example that comes from the draws alone: within an example, over the draws.
    per_example_deviation_of_draws: float


@torch.no_grad()
def classifier_gradients(
    model: SequenceClassifier, batch: Batch, *, draws: int, seed: int, advance: Callable[[], None] = lambda: None
) -> Tensor:
    """(draws, B, hidden units): of every example the gradient of its own loss.

    Args:
        advance: Called after every draw.
    """
    hidden: list[Tensor] = []
    first, *rest = model.head
    handle = first.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    try:
        with evaluating(model), first_part_once(model) as next_pass:
            for draw in range(draws):
                next_pass()
                resample(model, generator_for(seed, "gradients", draw))
                model_outputs(model, batch)
                advance()
    finally:
        handle.remove()
    units = torch.stack(hidden)
    with torch.enable_grad():
        units.requires_grad_()
        scores = units
        for layer in rest:
            scores = layer(scores)
        loss = cross_entropy(scores.flatten(0, 1), batch.targets.repeat(draws))
        return torch.autograd.grad(loss, units)[0]


def gradient_statistics(gradients: Tensor) -> GradientStatistics:
    """From (draws, B, units)."""
    gradients = gradients.double()
    of_passes, of_examples = gradients.mean(1), gradients.flatten(0, 1)
    of_draws = gradients.var(0, unbiased=False).mean(0).sqrt()
    return GradientStatistics(
        per_pass_deviation=_deviation(of_passes),
        per_pass_mean_absolute=of_passes.abs().mean().item(),
        per_example_deviation=_deviation(of_examples),
        per_example_mean_absolute=of_examples.abs().mean().item(),
        per_example_deviation_of_draws=of_draws.mean().item(),
    )


def _deviation(values: Tensor) -> float:
    """(N, units): over the values, mean over the units."""
    return values.std(0, unbiased=False).mean().item()
