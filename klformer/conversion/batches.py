"""Batches of a conversion: some to measure by, some to choose by, and the others, which come round again and again."""

import hashlib
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from klformer.conversion.hosts import Batch
from klformer.errors import ArgumentError, ArgumentTypeError

#: Of the batches that are given, one of so many is held out to measure by, and as many to choose by, but no more than
#: so many.
HELD_OUT_SHARE, MAX_HELD_OUT = 10, 8


class Batches:
    """As many batches as the steps need at most, in memory; a model's inputs are small beside its activations.

    Args:
        batches: Mappings of tensors; read once. The first ones are held out.
        evaluation: Batches to measure by, instead of some of `batches`.
        choosing: Batches to choose by, instead of some of `batches`.
        steps: Steps that will be taken.
        seed: Decides in which order they come.

    Raises:
        ArgumentError: there are not enough.
        ArgumentTypeError: one is not a mapping of tensors.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        evaluation: Iterable[Batch] | None = None,
        choosing: Iterable[Batch] | None = None,
        *,
        steps: int,
        seed: int,
    ) -> None:
        parts = sum(each is None for each in (evaluation, choosing))
        given = list(itertools.islice(iter(batches), max(1, steps) + parts * MAX_HELD_OUT))
        count = min(MAX_HELD_OUT, max(1, len(given) // HELD_OUT_SHARE))
        #: To measure by: nothing is chosen by them.
        self.held_out = given[:count] if evaluation is None else list(evaluation)
        rest = given[count:] if evaluation is None else given
        #: To choose by: when to stop, what was best, how many atoms are enough, which layers stay softmax.
        self.choosing = rest[:count] if choosing is None else list(choosing)
        self.train = rest[count:] if choosing is None else rest
        if not self.train or not self.held_out or not self.choosing:
            raise ArgumentError(
                "batches must be at least one to fit to, one to choose by and one to measure by, got "
                f"{len(self.train)}, {len(self.choosing)} and {len(self.held_out)}"
            )
        for batch in (*self.held_out, *self.choosing, *self.train):
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
        for batch in (*self.held_out, *self.choosing, *self.train):
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
