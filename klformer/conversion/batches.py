"""Batches of a conversion: some are held out to measure by, the others come round again and again."""

import hashlib
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from klformer.conversion.hosts import Batch
from klformer.errors import ArgumentError, ArgumentTypeError

#: Of the batches that are given, one of so many is held out, but no more than so many.
HELD_OUT_SHARE, MAX_HELD_OUT = 10, 8


class Batches:
    """As many batches as the steps need at most, in memory; a model's inputs are small beside its activations.

    Args:
        batches: Mappings of tensors; read once. The first ones are held out.
        evaluation: Batches to hold out instead.
        steps: Steps that will be taken.
        seed: Decides in which order they come.

    Raises:
        ArgumentError: there are not enough.
        ArgumentTypeError: one is not a mapping of tensors.
    """

    def __init__(self, batches: Iterable[Batch], evaluation: Iterable[Batch] | None, *, steps: int, seed: int) -> None:
        wanted = max(1, steps) + (0 if evaluation is not None else MAX_HELD_OUT)
        given = list(itertools.islice(iter(batches), wanted))
        if evaluation is None:
            count = min(MAX_HELD_OUT, max(1, len(given) // HELD_OUT_SHARE))
            self.held_out, self.train = given[:count], given[count:]
        else:
            self.held_out, self.train = list(evaluation), given
        if not self.train or not self.held_out:
            raise ArgumentError(
                f"batches must be at least one to fit to and one to measure by, got {len(given)}"
                + ("" if evaluation is None else f", and {len(self.held_out)} in evaluation")
            )
        for batch in (*self.held_out, *self.train):
            _check(batch)
        self._seed = seed

    def at(self, step: int) -> Batch:
        """The batch of a step: every batch once, in another order each time round."""
        turn, place = divmod(step, len(self.train))
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(self._seed * 1009 + turn))
        return self.train[int(order[place])]

    def fingerprint(self) -> str:
        """Tells these batches from others."""
        digest = hashlib.sha256()
        for batch in (*self.held_out, *self.train):
            for name, value in sorted(batch.items()):
                digest.update(f"{name} {tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def _check(batch: object) -> None:
    if not hasattr(batch, "items"):
        raise ArgumentTypeError(
            f"a batch must be a mapping from names of arguments to tensors, got {type(batch).__name__}"
        )
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"batch[{name!r}] must be a tensor, got {type(value).__name__}")
