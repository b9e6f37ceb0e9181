"""Accuracy of a model on a split, with the frequencies it has or averaged over new draws of them.

The paper reports the mean over draws and the accuracy of a majority vote among them. Draw d of a seed is the same for
every model and on every rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from klformer.kernels import Resampled, resample
from klformer.tasks import Batch, BucketSampler, Examples, collate
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
    sampler = BucketSampler(
        examples.lengths,
        batch_size=batch_size,
        shuffle=False,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    random = any(isinstance(module, Resampled) for module in model.modules())
    votes = torch.zeros(len(examples), num_classes, dtype=torch.long, device=accelerator.device)
    labels = torch.from_numpy(examples.labels).to(accelerator.device)
    losses, accuracies = [], []
    with _evaluating(model), torch.no_grad():
        for draw in range(draws if draws is not None and random else 1):
            if draws is not None:
                resample(model, generator_for(seed, "evaluation", draw))
            loss = torch.zeros((), device=accelerator.device)
            predicted = torch.zeros_like(labels)
            for indices in sampler.epoch(0):
                if len(indices) == 0:
                    continue
                batch = collate(examples, indices).to(accelerator.device)
                with accelerator.autocast():
                    scores = class_scores(model, batch)
                loss += nn.functional.cross_entropy(scores.float(), batch.labels, reduction="sum")
                predicted[batch.ids] = scores.argmax(-1)
            # Every example belongs to one rank; the others hold 0 for it.
            predicted = accelerator.reduce(predicted, "sum")
            votes.scatter_add_(1, predicted[:, None], torch.ones_like(predicted)[:, None])
            accuracies.append((predicted == labels).float().mean().item())
            losses.append(accelerator.reduce(loss, "sum").item() / len(examples))
    voting = (votes.argmax(-1) == labels).float().mean().item()
    return Evaluation(len(examples), float(np.mean(losses)), tuple(accuracies), voting)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; mode and frequencies are as before afterwards."""
    was_training = model.training
    noisy = [module for module in model.modules() if isinstance(module, Resampled)]
    noise = [{name: buffer.clone() for name, buffer in module.named_buffers()} for module in noisy]
    model.eval()
    try:
        yield
    finally:
        with torch.no_grad():
            for module, saved in zip(noisy, noise, strict=True):
                for name, buffer in module.named_buffers():
                    buffer.copy_(saved[name])
        model.train(was_training)
