"""Sequences of different lengths, stored end to end in one array of the smallest type that holds them."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from klformer.errors import ArgumentError
from klformer.memory import release

IntArray = NDArray[np.int64]
AnyArray = NDArray[Any]
#: The target of a position of which nothing is asked.
IGNORED = -100
#: Types of targets: classes, and numbers.
TARGET_TYPES = (np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.float64))
#: Tokens that a fingerprint looks at: all of most data sets, evenly spaced ones of the largest.
_FINGERPRINT_TOKENS = 1 << 24


@dataclass(frozen=True, eq=False)
class Sequences:
    """N sequences; number i is `values[offsets[i] : offsets[i + 1]]`.

    Args:
        values: (total,) token ids, which are integers, or (total, width) vectors.
        offsets: (N + 1,), int64, starting at 0 and ending at total.

    Raises:
        ArgumentError: values are of another type or shape, or offsets do not fit them.

    Examples:
        >>> import numpy as np
        >>> from klformer.lab.data import Sequences
        >>> sequences = Sequences.from_list([np.array([1, 2, 3]), np.array([4])])
        >>> len(sequences), sequences.lengths, sequences.values.dtype
        (2, array([3, 1]), dtype('uint8'))
        >>> sequences.take(np.array([1, 0]))[0]
        array([4], dtype=uint8)
        >>> vectors = Sequences.from_matrix(np.zeros((5, 10, 3)))
        >>> len(vectors), vectors.width
        (5, 3)
    """

    values: AnyArray
    offsets: IntArray

    def __post_init__(self) -> None:
        if self.values.dtype.kind not in {1: "iu", 2: "iuf"}.get(self.values.ndim, ""):
            raise ArgumentError(
                "values must be integers of one dimension or numbers of two, got "
                f"{self.values.dtype} {self.values.shape}"
            )
        offsets = self.offsets
        if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or offsets[-1] != len(self.values):
            raise ArgumentError(f"offsets must be one-dimensional and go from 0 to {len(self.values)}")
        if (np.diff(offsets) < 0).any():
            raise ArgumentError("offsets must not decrease")

    @classmethod
    def from_list(cls, rows: Sequence[AnyArray]) -> "Sequences":
        """Store rows of different lengths, in the smallest type that holds them.

        Args:
            rows: Token ids (length,), or vectors (length, width). Integers become the smallest type that holds all of
                them, unsigned if none is negative. Other numbers become float32.

        Raises:
            ArgumentError: rows are of a type that sequences do not have.
        """
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.concatenate(rows) if rows else np.zeros(0, np.uint8)
        if values.dtype.kind == "f":
            return cls(values.astype(np.float32), offsets)
        if values.size == 0:
            return cls(values.astype(np.uint8), offsets)
        low, high = int(values.min()), int(values.max())
        smallest = np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))
        return cls(values.astype(smallest), offsets)

    @classmethod
    def from_matrix(cls, rows: AnyArray) -> "Sequences":
        """Store sequences of one length, without a copy.

        Args:
            rows: Token ids (N, length), or vectors (N, length, width).

        Raises:
            ArgumentError: rows are of a type that sequences do not have.
        """
        offsets = np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1]
        return cls(rows.reshape(-1, *rows.shape[2:]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> AnyArray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    @property
    def width(self) -> int | None:
        """Size of the vectors; None for token ids."""
        return None if self.values.ndim == 1 else int(self.values.shape[1])

    def take(self, indices: IntArray) -> "Sequences":
        """Return the chosen sequences, in the given order; a copy.

        Args:
            indices: Numbers of the sequences, (count,), int64.

        Raises:
            IndexError: there is no such sequence.
        """
        offsets = np.zeros(len(indices) + 1, np.int64)
        np.cumsum(self.lengths[indices], out=offsets[1:])
        values = np.empty((int(offsets[-1]), *self.values.shape[1:]), self.values.dtype)
        # One slice after the other: a gather would need eight bytes of index for every byte of text.
        for position, index in enumerate(indices):
            values[offsets[position] : offsets[position + 1]] = self[int(index)]
        return Sequences(values, offsets)


@dataclass(frozen=True, eq=False)
class Examples:
    """Sequences, or pairs of them, each with its target: a class (int64) or a number (float32 or float64).

    Args:
        first: The sequences, or the first sides of the pairs.
        targets: (N,); or (N, length) where positions have targets of their own, IGNORED for the others.
        second: The second sides of pairs.

    Raises:
        ArgumentError: targets are of another type or shape, or there are not as many as sequences.

    Examples:
        >>> import numpy as np
        >>> from klformer.lab.data import Examples, Sequences
        >>> texts = Sequences.from_list([np.array([1, 2, 3]), np.array([4])])
        >>> examples = Examples(texts, np.array([0, 1]))
        >>> len(examples), examples.lengths
        (2, array([3, 1]))
        >>> examples.take(np.array([1])).targets
        array([1])
        >>> examples.fingerprint() == examples.take(np.array([0, 1])).fingerprint()
        True
    """

    first: Sequences
    targets: AnyArray
    second: Sequences | None = None

    def __post_init__(self) -> None:
        if self.targets.dtype not in TARGET_TYPES or self.targets.ndim not in (1, 2):
            raise ArgumentError(
                "targets must be of one or two dimensions and int64, float32 or float64, got "
                f"{self.targets.dtype} of shape {self.targets.shape}"
            )
        sizes = [len(self.first), len(self.targets)] + ([] if self.second is None else [len(self.second)])
        if len(set(sizes)) > 1:
            raise ArgumentError(f"sequences and targets must be as many, got {sizes}")

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> IntArray:
        """Length of each example; of a pair, that of its longer side."""
        if self.second is None:
            return self.first.lengths
        return np.maximum(self.first.lengths, self.second.lengths)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the targets, the lengths and the tokens, by which other data is told from the same.

        Returns:
            64 hexadecimal digits. Of more than 16 million tokens, evenly spaced ones count.
        """
        digest = hashlib.sha256(self.targets.tobytes())
        for side in (self.first, self.second):
            if side is not None:
                digest.update(side.offsets.tobytes())
                every = 1 + len(side.values) // _FINGERPRINT_TOKENS
                for start in range(0, len(side.values), every << 18):
                    digest.update(side.values[start : start + (every << 18) : every].tobytes())
                    release(side.values)
        return digest.hexdigest()

    def take(self, indices: IntArray) -> "Examples":
        """Return the chosen examples, in the given order; a copy.

        Args:
            indices: Numbers of the examples, (count,), int64.

        Raises:
            IndexError: there is no such example.
        """
        second = None if self.second is None else self.second.take(indices)
        return Examples(self.first.take(indices), self.targets[indices], second)


class ByteRows:
    """Collects rows of bytes in one buffer, which becomes the array without a copy."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._offsets = [0]

    @staticmethod
    def of(rows: Iterable[bytes]) -> "ByteRows":
        """Collect some rows at once."""
        collected = ByteRows()
        for row in rows:
            collected.add(row)
        return collected

    def add(self, row: bytes) -> None:
        self._buffer += row
        self._offsets.append(len(self._buffer))

    def as_they_are(self) -> Sequences:
        """Return sequences whose ids are the bytes."""
        return Sequences(np.frombuffer(self._buffer, np.uint8), np.asarray(self._offsets, np.int64))

    def plus_one(self) -> Sequences:
        """Return sequences of ids byte + 1, so that 0 is free for padding. UTF-8 has no byte 255: an id takes one byte
        there."""
        values: AnyArray = np.frombuffer(self._buffer, np.uint8)
        if b"\xff" in self._buffer:
            values = values.astype(np.uint16)
        values += 1
        return Sequences(values, np.asarray(self._offsets, np.int64))
