"""Batches of sequences of similar lengths, padded to their own longest and not to the longest there is.

Padding is marked by the mask alone, True = keep; padded positions hold 0, which is a real id in some tasks. An empty
sequence is all padding, and a batch has at least one column.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.lab.data.sequences import IGNORED, AnyArray, Examples, IntArray, Sequences


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples as tensors.

    Args:
        inputs: (B, L) token ids, int64, or (B, L, width) vectors, float32.
        key_mask: (B, L), True = keep.
        targets: (B,), int64 or float32; or (B, L), of the positions.
        ids: (B,), the examples' positions in the data set.
        second: The other side of pairs, padded by itself; None if there is none.
        second_mask: Its mask.
        num_tokens: Real tokens of both sides.

    Examples:
        >>> import numpy as np
        >>> from klformer.lab.data import Examples, Sequences, collate
        >>> sequences = Sequences.from_list([np.array([5, 6, 7, 8]), np.array([9])])
        >>> batch = collate(Examples(sequences, np.array([1, 0])), np.arange(2))
        >>> len(batch), batch.num_tokens, batch.num_padded
        (2, 5, 8)
        >>> [tuple(each.shape) for each in batch.arguments()]
        [(2, 4), (2, 4)]
        >>> half, start = batch.part(1, 2, of_positions=False)
        >>> half.to("cpu").inputs.tolist(), start
        ([[7, 8], [0, 0]], 2)
    """

    inputs: Tensor
    key_mask: Tensor
    targets: Tensor
    ids: Tensor
    num_tokens: int
    second: Tensor | None = None
    second_mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def num_padded(self) -> int:
        """Tokens of both sides with the padding."""
        return self.key_mask.numel() + (0 if self.second_mask is None else self.second_mask.numel())

    def arguments(self) -> tuple[Tensor | None, ...]:
        """Return what a model is called with: inputs and mask; for pairs both inputs, then both masks."""
        if self.second is None:
            return self.inputs, self.key_mask
        return self.inputs, self.second, self.key_mask, self.second_mask

    def part(self, index: int, count: int, *, of_positions: bool) -> "tuple[Batch, int]":
        """Return one of `count` nearly equal parts along the length, and where it begins; both sides of pairs are cut.

        Args:
            index: Which part, from 0.
            count: How many parts there are.
            of_positions: Targets are of positions, and cut as well.
        """

        def cut(x: Tensor) -> Tensor:
            return x.tensor_split(count, 1)[index]

        key_mask = cut(self.key_mask)
        second_mask = None if self.second_mask is None else cut(self.second_mask)
        part = replace(
            self,
            inputs=cut(self.inputs),
            key_mask=key_mask,
            targets=cut(self.targets) if of_positions else self.targets,
            num_tokens=int(key_mask.sum()) + (0 if second_mask is None else int(second_mask.sum())),
            second=None if self.second is None else cut(self.second),
            second_mask=second_mask,
        )
        return part, sum(x.shape[1] for x in self.key_mask.tensor_split(count, 1)[:index])

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on another device.

        Args:
            device: Where it goes, as torch names it.
        """
        return replace(
            self,
            inputs=self.inputs.to(device),
            key_mask=self.key_mask.to(device),
            targets=self.targets.to(device),
            ids=self.ids.to(device),
            second=None if self.second is None else self.second.to(device),
            second_mask=None if self.second_mask is None else self.second_mask.to(device),
        )


def collate(examples: Examples, indices: IntArray, *, pad_to: int | None = None) -> Batch:
    """Make a batch of the chosen examples, padded to its longest sequence.

    Args:
        examples: What is chosen from.
        indices: (B,), at least one.
        pad_to: Pad to this length instead.

    Raises:
        ValueError: there is nothing to batch, or a sequence is longer than `pad_to`.

    Examples:
        >>> import numpy as np
        >>> from klformer.lab.data import Examples, Sequences, collate
        >>> sequences = Sequences.from_list([np.array([5, 6]), np.array([7]), np.array([8, 9, 10])])
        >>> batch = collate(Examples(sequences, np.array([1, 0, 1])), np.array([0, 1]))
        >>> batch.inputs.tolist(), batch.key_mask.tolist()
        ([[5, 6], [7, 0]], [[True, True], [True, False]])
        >>> batch.targets.tolist(), batch.ids.tolist()
        ([1, 0], [0, 1])
    """
    if len(indices) == 0:
        raise ArgumentError("a batch must have at least one example")
    inputs, key_mask = _pad(examples.first, indices, pad_to)
    num_tokens = int(examples.first.lengths[indices].sum())
    second = second_mask = None
    if examples.second is not None:
        second, second_mask = _pad(examples.second, indices, pad_to)
        num_tokens += int(examples.second.lengths[indices].sum())
    return Batch(
        inputs=inputs,
        key_mask=key_mask,
        targets=_as_tensor(examples.targets[indices], inputs.shape[1]),
        ids=torch.from_numpy(np.array(indices, np.int64)),
        num_tokens=num_tokens,
        second=second,
        second_mask=second_mask,
    )


def _as_tensor(targets: AnyArray, length: int) -> Tensor:
    """Return classes as they are, numbers in the models' precision; those of positions as long as the inputs."""
    if targets.ndim == 2:
        cut = targets[:, :length]
        targets = np.pad(cut, ((0, 0), (0, length - cut.shape[1])), constant_values=IGNORED)
    tensor = torch.from_numpy(targets)
    return tensor.float() if tensor.is_floating_point() else tensor


def _pad(sequences: Sequences, indices: IntArray, pad_to: int | None) -> tuple[Tensor, Tensor]:
    lengths = sequences.lengths[indices]
    longest = int(lengths.max())
    if pad_to is not None and longest > pad_to:
        raise ArgumentError(f"pad_to must be at least the longest sequence, {longest}, got {pad_to}")
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

    Args:
        lengths: (N,), of the examples.
        batch_size: Examples in a batch; the last one has what is left.
        seed: Of the orders.
        shuffle: Draw a new order every epoch.
        window: Batches that are sorted together: more saves padding, fewer makes batches more random.

    Raises:
        ArgumentError: there are no examples, or a number is too small.

    Examples:
        >>> import numpy as np
        >>> from klformer.lab.data import BucketSampler
        >>> sampler = BucketSampler(np.array([3, 90, 4, 80, 5]), batch_size=2, shuffle=False)
        >>> len(sampler), [batch.tolist() for batch in sampler.batches(epoch=0)]
        (3, [[0, 2], [4, 3], [1]])
    """

    def __init__(
        self,
        lengths: IntArray,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        window: int = 50,
    ) -> None:
        check_count("batch_size", batch_size)
        check_count("seed", seed, minimum=0)
        check_count("window", window)
        self._lengths = np.asarray(lengths)
        if not len(self._lengths):
            raise ArgumentError("there must be at least one example")
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._window = window

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self._lengths) // self._batch_size)

    def batches(self, epoch: int) -> list[IntArray]:
        """Return the positions of the examples of every batch of an epoch.

        Args:
            epoch: Which one, from 0.
        """
        generator = np.random.default_rng((self._seed, epoch))
        count = len(self._lengths)
        order = generator.permutation(count) if self._shuffle else np.arange(count)
        window = self._window * self._batch_size if self._shuffle else count
        batches = []
        for start in range(0, count, window):
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

    Examples:
        >>> from klformer.lab.data import PaddingReport
        >>> PaddingReport(real=90, padded=100, longest=400).saved
        0.75
    """

    real: int
    padded: int
    longest: int

    @property
    def saved(self) -> float:
        """The part of `longest` that is not worked through."""
        return 1 - self.padded / self.longest


def padding_report(lengths: IntArray, batches: Iterable[IntArray]) -> PaddingReport:
    """Count what padding costs for these batches, one side of pairs at a time.

    Args:
        lengths: (N,), of the examples.
        batches: The positions of the examples of each batch.

    Raises:
        ValueError: there are no examples.

    Examples:
        >>> import numpy as np
        >>> from klformer.lab.data import padding_report
        >>> padding_report(np.array([3, 4, 90]), [np.array([0, 1]), np.array([2])])
        PaddingReport(real=97, padded=98, longest=270)
    """
    lengths = np.asarray(lengths)
    real = padded = count = 0
    for batch in batches:
        here = lengths[batch]
        real += int(here.sum())
        padded += max(1, int(here.max())) * len(batch)
        count += len(batch)
    return PaddingReport(real=real, padded=padded, longest=max(1, int(lengths.max())) * count)
