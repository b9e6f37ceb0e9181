"""The metrics of a model on a split, with the frequencies it has or over new draws of them.

The paper reports the mean over draws and the accuracy of a majority vote among them. Draw d of a seed is the same for
every model and on every rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from klformer.lab.data import Batch, BucketSampler, Examples, collate
from klformer.lab.training.objective import Objective
from klformer.lab.training.processes import Layout, make_layout
from klformer.lab.training.reuse import first_part_once
from klformer.lab.training.seeds import generator_for
from klformer.noise import has_noise, kept_noise, resample


@dataclass(frozen=True)
class Evaluation:
    """Result of evaluating on one split.

    Args:
        num_examples: Examples of the split.
        loss: Mean over the draws.
        by_draw: Of every metric its value in each draw.
        combined: Of every metric its value for the combined prediction of all draws.
        combination: What that is called.
        details: What else the objective has to say, from the mean of the draws' answers.
    """

    num_examples: int
    loss: float
    by_draw: Mapping[str, tuple[float, ...]]
    combined: Mapping[str, float]
    combination: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def draws(self) -> int:
        return len(next(iter(self.by_draw.values())))

    def mean(self, metric: str) -> float:
        """Return a metric, averaged over the draws."""
        return float(np.mean(self.by_draw[metric]))

    def deviation(self, metric: str) -> float:
        """Return the standard deviation of a metric over the draws; 0 if there was one."""
        return float(np.std(self.by_draw[metric], ddof=1)) if self.draws > 1 else 0.0

    def means(self) -> dict[str, float]:
        """Return all metrics, averaged over the draws."""
        return {name: self.mean(name) for name in self.by_draw}

    def as_dict(self) -> dict[str, Any]:
        """Return a flat result: of every metric NAME, NAME_std, NAME_by_draw and voting_NAME or combined_NAME."""
        content: dict[str, Any] = {"num_examples": self.num_examples, "draws": self.draws, "loss": self.loss}
        for name, values in self.by_draw.items():
            content |= {
                name: self.mean(name),
                f"{name}_std": self.deviation(name),
                f"{self.combination}_{name}": self.combined[name],
                f"{name}_by_draw": list(values),
            }
        return content | dict(self.details)


def evaluate(
    model: nn.Module,
    examples: Examples,
    *,
    objective: Objective,
    accelerator: Accelerator,
    batch_size: int,
    draws: int | None = None,
    seed: int = 0,
    layout: Layout | None = None,
) -> Evaluation:
    """Evaluate on all examples, over all processes.

    Args:
        layout: How the processes share the work; the examples alone, if None.
        draws: Draws of the frequencies; None to evaluate once with those that the model has, which are put back in any
            case. A model without random frequencies is evaluated once.
    """
    layout = make_layout(accelerator) if layout is None else layout
    batches = BucketSampler(examples.lengths, batch_size=batch_size, shuffle=False).batches(0)
    passes = draws if draws is not None and has_noise(model) else 1
    device = accelerator.device
    shape = (passes, len(examples), *objective.prediction_shape)
    predicted = torch.zeros(shape, dtype=objective.prediction_dtype, device=device)
    losses, counted = torch.zeros(passes, device=device), torch.zeros((), dtype=torch.long, device=device)
    explained = draws is not None and objective.has_details
    answers = torch.zeros(len(examples), objective.num_outputs if explained else 0, device=device)
    with evaluating(model):
        for everyones in batches:
            indices = layout.share(everyones)
            counts = len(indices) > 0
            if not counts:
                if layout.shards is None:
                    continue
                indices = everyones[:1]  # whose weights are shared out takes part in every pass
            whole = objective.pose(collate(examples, indices).to(device), ())
            batch, start = layout.part(whole, of_positions=objective.of_positions)
            numbers = None if draws is None else range(passes)
            with accelerator.autocast():
                outputs = outputs_of_draws(model, batch, numbers, seed=seed, outputs=objective.outputs).float()
            if not counts:
                continue
            if layout.num_parts > 1 and objective.of_positions:
                predicted[:, batch.ids] = objective.predict_part(outputs, batch, start)
            elif layout.part_index == 0:
                predicted[:, batch.ids] = objective.predict(outputs, batch)
            else:
                continue  # the first part has said the same
            losses += objective.loss_of(outputs, batch)
            counted += objective.count(outputs, batch)
            if explained:
                answers[batch.ids] = objective.answers(outputs).mean(0)
    # Every example, or part of one, belongs to one rank; the others hold 0 for it.
    predicted = accelerator.reduce(predicted, "sum")
    losses = accelerator.reduce(losses, "sum") / accelerator.reduce(counted, "sum").item()
    targets = torch.from_numpy(examples.targets).to(device)
    of_draws = [objective.measure(predictions, targets) for predictions in predicted]
    return Evaluation(
        num_examples=len(examples),
        loss=losses.mean().item(),
        by_draw={metric.name: tuple(values[metric.name] for values in of_draws) for metric in objective.metrics},
        combined=objective.measure(objective.combine(predicted), targets),
        combination=objective.combination,
        details=objective.details(accelerator.reduce(answers, "sum"), targets) if explained else {},
    )


Outputs = Callable[[nn.Module, Batch], Tensor]


def model_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """Return what a model gives for a batch, where no objective says otherwise."""
    return model(*batch.arguments())


@torch.no_grad()
def outputs_of_draws(
    model: nn.Module, batch: Batch, draws: Iterable[int] | None, *, seed: int, outputs: Outputs = model_outputs
) -> Tensor:
    """Return outputs (draws, B, ...) of a batch under some draws of the noise, or with the noise that the model has.

    The model is to be in evaluation mode; its noise is that of the last draw afterwards.
    """
    if draws is None:
        return outputs(model, batch).unsqueeze(0)
    return torch.stack(list(each_draw(model, batch, draws, seed=seed, outputs=outputs)))


@torch.no_grad()
def each_draw(
    model: nn.Module, batch: Batch, draws: Iterable[int], *, seed: int, outputs: Outputs = model_outputs
) -> Iterator[Tensor]:
    """Yield outputs (B, ...) of a batch under one draw of the noise after the other.

    Draw d of a seed is the same for every batch, and whatever was drawn before. What comes before the first noise is
    computed once.
    """
    with first_part_once(model) as next_pass:
        for draw in draws:
            next_pass()
            resample(model, generator_for(seed, "evaluation", draw))
            yield outputs(model, batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside; mode and frequencies are as before afterwards."""
    was_training = model.training
    model.eval()
    try:
        with kept_noise(model):
            yield
    finally:
        model.train(was_training)
