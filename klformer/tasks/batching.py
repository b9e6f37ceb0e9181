"""Batches of sequences of similar lengths, padded to their own longest and not to the longest there is.

Padding is marked by the mask alone, True = keep; padded positions hold 0, which is a real id in some tasks. An empty
sequence is all padding, and a batch has at least one column.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from klformer.checks import check_count
from klformer.tasks.sequences import Examples, IntArray, Sequences


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples as tensors.

    Args:
        inputs: (B, L) token ids, int64, or (B, L, width) vectors, float32.
        key_mask: (B, L), True = keep.
        labels: (B,).
        ids: (B,), the examples' positions in the data set.
        second: The other side of pairs, padded by itself; None if there is none.
        second_mask: Its mask.
        num_tokens: Real tokens of both sides.
    """

    inputs: Tensor
    key_mask: Tensor
    labels: Tensor
    ids: Tensor
    num_tokens: int
    second: Tensor | None = None
    second_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_padded(self) -> int:
        """Tokens of both sides with the padding."""
        return self.key_mask.numel() + (0 if self.second_mask is None else self.second_mask.numel())

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on another device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            key_mask=self.key_mask.to(device),
            labels=self.labels.to(device),
            ids=self.ids.to(device),
            second=None if self.second is None else self.second.to(device),
            second_mask=None if self.second_mask is None else self.second_mask.to(device),
        )


def collate(examples: Examples, indices: IntArray, *, pad_to: int | None = None) -> Batch:
    """The chosen examples as a batch, padded to its longest sequence.

    Args:
        indices: (B,), at least one.
        pad_to: Pad to this length instead.

    Raises:
        ValueError: there is nothing to batch, or a sequence is longer than `pad_to`.
    """
    if len(indices) == 0:
        raise ValueError("a batch must have at least one example")
    inputs, key_mask = _pad(examples.first, indices, pad_to)
    num_tokens = int(examples.first.lengths[indices].sum())
    second = second_mask = None
    if examples.second is not None:
        second, second_mask = _pad(examples.second, indices, pad_to)
        num_tokens += int(examples.second.lengths[indices].sum())
    return Batch(
        inputs=inputs,
        key_mask=key_mask,
        labels=torch.from_numpy(examples.labels[indices]),
        ids=torch.from_numpy(np.array(indices, np.int64)),
        num_tokens=num_tokens,
        second=second,
        second_mask=second_mask,
    )


def _pad(sequences: Sequences, indices: IntArray, pad_to: int | None) -> tuple[Tensor, Tensor]:
    lengths = sequences.lengths[indices]
    longest = int(lengths.max())
    if pad_to is not None and longest > pad_to:
        raise ValueError(f"pad_to must be at least the longest sequence, {longest}, got {pad_to}")
    size = max(1, longest if pad_to is None else pad_to)
    dtype = np.int64 if sequences.width is None else np.float32
    padded = np.zeros((len(indices), size, *sequences.values.shape[1:]), dtype)
    for row, index in enumerate(indices):
        padded[row, : lengths[row]] = sequences[int(index)]
    return torch.from_numpy(padded), torch.from_numpy(np.arange(size) < lengths[:, None])


class BucketSampler:
    """Batches of examples of similar lengths, the same for the same seed and epoch, every example once an epoch.

    For training the examples are shuffled, sorted by length inside windows of `window` batches, cut into batches, and
    the batches are shuffled. Without `shuffle`, for evaluation, all are sorted by length.

    With several processes every one makes the same global batches and takes its contiguous part of each; the parts
    differ in size by one at most. A last batch with fewer examples than processes would leave some without work: with
    `shuffle` it is refused, since data-parallel training needs all of them; in evaluation the part is empty, and to
    be skipped.

    Args:
        lengths: (N,).
        batch_size: Size of a global batch, over all processes.
        shuffle: Draw a new order every epoch.
        drop_last: Leave out a random N mod batch_size of the examples, others every epoch, so that all batches are
            full.
        window: Batches that are sorted together: more saves padding, fewer makes batches more random.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        lengths: IntArray,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        window: int = 50,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_count("batch_size", batch_size)
        check_count("seed", seed, minimum=0)
        check_count("window", window)
        check_count("world_size", world_size)
        check_count("rank", rank, minimum=0)
        if rank >= world_size:
            raise ValueError(f"rank must be below world_size={world_size}, got {rank}")
        if batch_size < world_size:
            raise ValueError(f"batch_size must be at least world_size={world_size}, got {batch_size}")
        self._lengths = np.asarray(lengths)
        self._last = len(self._lengths) % batch_size
        self._num_batches = len(self._lengths) // batch_size + (0 if drop_last or not self._last else 1)
        if self._num_batches == 0:
            raise ValueError(
                f"there must be at least one batch, got {len(self._lengths)} examples for batch_size={batch_size}"
            )
        if shuffle and not drop_last and 0 < self._last < world_size:
            raise ValueError(
                f"the last batch has {self._last} examples for {world_size} processes; "
                "pass drop_last=True or another batch_size"
            )
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._window = window
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        """Batches an epoch."""
        return self._num_batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[IntArray]:
        """This process's parts of the batches of an epoch, from batch number `start` on."""
        check_count("epoch", epoch, minimum=0)
        check_count("start", start, minimum=0)
        for batch in self.global_batches(epoch)[start:]:
            yield np.array_split(batch, self._world_size)[self._rank]

    def global_batches(self, epoch: int) -> list[IntArray]:
        """All batches of an epoch, over all processes."""
        generator = np.random.default_rng((self._seed, epoch))
        count = len(self._lengths)
        order = generator.permutation(count) if self._shuffle else np.arange(count)
        if self._drop_last:
            # Before sorting: the examples left out must not be the longest ones.
            order = order[: count - self._last]
        window = self._window * self._batch_size if self._shuffle else count
        batches = []
        for start in range(0, len(order), window):
            chosen = order[start : start + window]
            chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
            batches += [chosen[i : i + self._batch_size] for i in range(0, len(chosen), self._batch_size)]
        if self._shuffle:
            return [batches[index] for index in generator.permutation(len(batches))]
        return batches


@dataclass(frozen=True)
class PaddingReport:
    """Tokens that a model has to work through.

    Args:
        real: Without padding.
        padded: With every batch padded to its own longest sequence.
        longest: With everything padded to the longest sequence of all.
    """

    real: int
    padded: int
    longest: int

    @property
    def saved(self) -> float:
        """The part of `longest` that is not worked through."""
        return 1 - self.padded / self.longest


def padding_report(lengths: IntArray, batches: Iterable[IntArray]) -> PaddingReport:
    """What padding costs for these batches, one side of pairs at a time."""
    lengths = np.asarray(lengths)
    real = padded = count = 0
    for batch in batches:
        here = lengths[batch]
        real += int(here.sum())
        padded += max(1, int(here.max())) * len(batch)
        count += len(batch)
    return PaddingReport(real=real, padded=padded, longest=max(1, int(lengths.max())) * count)
