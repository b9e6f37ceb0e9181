"""Accuracy of a model on a split, with the frequencies it has or averaged over new draws of them.

The paper reports the mean over draws and the accuracy of a majority vote among them. Draw d of a seed is the same for
every model and on every rank.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from klformer.data import Batch, BucketSampler, Examples, collate
from klformer.models.reuse import first_part_once
from klformer.noise import has_noise, kept_noise, resample
from klformer.training.seeds import generator_for


@dataclass(frozen=True)
class Evaluation:
    """Result of evaluating on one split."""

    num_examples: int
    loss: float
    accuracies: tuple[float, ...]
    voting_accuracy: float

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float:
        """Standard deviation over the draws; 0 if there was one."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else 0.0

    def as_dict(self) -> dict[str, float | int | list[float]]:
        return {
            "num_examples": self.num_examples,
            "loss": self.loss,
            "accuracy": self.mean,
            "accuracy_std": self.deviation,
            "voting_accuracy": self.voting_accuracy,
            "draws": len(self.accuracies),
            "accuracies": list(self.accuracies),
        }


def class_scores(model: nn.Module, batch: Batch) -> Tensor:
    """Scores (B, num_classes) of a batch, of single sequences or pairs."""
    if batch.second is None:
        return model(batch.inputs, batch.key_mask)
    return model(batch.inputs, batch.second, batch.key_mask, batch.second_mask)


def evaluate(
    model: nn.Module,
    examples: Examples,
    *,
    accelerator: Accelerator,
    batch_size: int,
    num_classes: int,
    draws: int | None = None,
    seed: int = 0,
) -> Evaluation:
    """Evaluate on all examples, over all processes.

    Args:
        draws: Draws of the frequencies; None to evaluate once with those that the model has, which are put back in any
            case. A model without random frequencies is evaluated once.
    """
    batches = BucketSampler(examples.lengths, batch_size=batch_size, shuffle=False).batches(0)
    passes = draws if draws is not None and has_noise(model) else 1
    labels = torch.from_numpy(examples.labels).to(accelerator.device)
    predicted = torch.zeros(passes, len(examples), dtype=torch.long, device=accelerator.device)
    losses = torch.zeros(passes, device=accelerator.device)
    with evaluating(model):
        for everyones in batches:
            indices = np.array_split(everyones, accelerator.num_processes)[accelerator.process_index]
            if len(indices) == 0:
                continue
            batch = collate(examples, indices).to(accelerator.device)
            with accelerator.autocast():
                scores = scores_of_draws(model, batch, None if draws is None else range(passes), seed=seed).float()
            wanted = batch.labels.expand(passes, -1)
            losses += nn.functional.cross_entropy(scores.movedim(-1, 1), wanted, reduction="none").sum(1)
            predicted[:, batch.ids] = scores.argmax(-1)
    # Every example belongs to one rank; the others hold 0 for it.
    predicted = accelerator.reduce(predicted, "sum")
    losses = accelerator.reduce(losses, "sum") / len(examples)
    accuracies = (predicted == labels).float().mean(1)
    votes = nn.functional.one_hot(predicted, num_classes).sum(0)
    voting = (votes.argmax(-1) == labels).float().mean().item()
    return Evaluation(len(examples), losses.mean().item(), tuple(accuracies.tolist()), voting)


@torch.no_grad()
def scores_of_draws(model: nn.Module, batch: Batch, draws: Iterable[int] | None, *, seed: int) -> Tensor:
    """Scores (draws, B, num_classes) of a batch under some draws of the noise, or with the noise that the model has.

    The model is to be in evaluation mode; its noise is that of the last draw afterwards.
    """
    if draws is None:
        return class_scores(model, batch).unsqueeze(0)
    return torch.stack(list(each_draw(model, batch, draws, seed=seed)))


@torch.no_grad()
def each_draw(model: nn.Module, batch: Batch, draws: Iterable[int], *, seed: int) -> Iterator[Tensor]:
    """Scores (B, num_classes) of a batch under one draw of the noise after the other.

    Draw d of a seed is the same for every batch, and whatever was drawn before. What comes before the first noise is
    computed once.
    """
    with first_part_once(model) as next_pass:
        for draw in draws:
            next_pass()
            resample(model, generator_for(seed, "evaluation", draw))
            yield class_scores(model, batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; mode and frequencies are as before afterwards."""
    was_training = model.training
    model.eval()
    try:
        with kept_noise(model):
            yield
    finally:
        model.train(was_training)
