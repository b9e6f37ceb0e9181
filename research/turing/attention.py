"""Attention with the Gaussian kernel, one query at a time: hard, soft, and estimated by random features.

    hard    the mean of the values whose keys score highest, score(q, k) = -|q - k|^2
    soft    weights exp(-|q - k|^2 / (2 T)), normalised; tends to hard attention as T falls
    rks     weights phi(q).phi(k), phi(x) = [cos(Omega x), sin(Omega x)]
    prf     weights phi(q).phi(k), phi(x) = exp(Omega x - |x|^2)

In the last two, queries and keys are divided by sqrt(T) and the rows of Omega are N(0, I): both are unbiased estimates
of the weights of soft attention (Lemma S.2 of the paper without its slips). They never see single keys again: the
memory is phi(K)^T [V, 1], as everywhere in linear attention. PRF is kept in log space, each feature relative to its
largest value so far, which cancels in the quotient.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from klformer.checks import check_choice, check_count, check_number

#: Numbers of float64, or Python's integers and fractions.
Array = npt.NDArray[Any]
#: Queries and keys whose RKS features are kept for a while.
RECENT = 16


class Memory(ABC):
    """The keys and values so far."""

    @abstractmethod
    def append(self, key: Array, value: Array) -> None:
        """Add a key (D,) and its value (E,)."""

    @abstractmethod
    def read(self, query: Array) -> Array:
        """The attention of a query (D,) over all that was added: (E,)."""


class GaussianAttention(ABC):
    """A way of attending; makes memories."""

    #: Type of the numbers: object stands for exact arithmetic.
    dtype: npt.DTypeLike = np.float64

    @abstractmethod
    def memory(self, key_dim: int, value_dim: int, stream: int) -> Memory:
        """An empty memory. `stream` numbers the attention layers: each has frequencies of its own."""


class _Rows:
    """Rows that grow at the end."""

    def __init__(self, dim: int, dtype: npt.DTypeLike) -> None:
        self.table: Array = np.empty((16, dim), dtype)
        self.count = 0

    def append(self, row: Array) -> None:
        if self.count == len(self.table):
            self.table = np.concatenate([self.table, np.empty_like(self.table)])
        self.table[self.count] = row
        self.count += 1

    def get(self) -> Array:
        return self.table[: self.count]


class _PlainMemory(Memory):
    def __init__(self, key_dim: int, value_dim: int, dtype: npt.DTypeLike, temperature: float | None) -> None:
        self.keys = _Rows(key_dim, dtype)
        self.values = _Rows(value_dim, dtype)
        self.temperature = temperature

    def append(self, key: Array, value: Array) -> None:
        self.keys.append(key)
        self.values.append(value)

    def read(self, query: Array) -> Array:
        values = self.values.get()
        # The differences are squared, not expanded: in float64 this is what the range of the tie break rests on.
        scores = -np.square(self.keys.get() - query).sum(-1)
        best = scores.max()
        if self.temperature is None:
            chosen = values[scores == best]
            return chosen.sum(0) / len(chosen) if values.dtype != object else _exact_mean(chosen)
        with np.errstate(over="ignore"):
            weights = np.exp((scores - best) / (2 * self.temperature))
        return weights @ values / weights.sum()


def _exact_mean(rows: Array) -> Array:
    return rows.sum(0) * Fraction(1, len(rows))


@dataclass(frozen=True)
class HardAttention(GaussianAttention):
    """The mean of the values of the nearest keys, Eq. "Att" of the appendix."""

    exact: bool = False
    """Compute with integers and fractions instead of float64."""

    @property
    def dtype(self) -> npt.DTypeLike:  # type: ignore[override]
        return np.dtype(object) if self.exact else np.float64

    def memory(self, key_dim: int, value_dim: int, stream: int) -> Memory:
        return _PlainMemory(key_dim, value_dim, self.dtype, temperature=None)


@dataclass(frozen=True)
class SoftAttention(GaussianAttention):
    """Weights exp(-|q - k|^2 / (2 T)), normalised."""

    temperature: float

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, exclusive=True)

    def memory(self, key_dim: int, value_dim: int, stream: int) -> Memory:
        return _PlainMemory(key_dim, value_dim, self.dtype, temperature=self.temperature)


@dataclass(frozen=True)
class FeatureAttention(GaussianAttention):
    """Soft attention with its kernel estimated by random features."""

    feature_map: Literal["rks", "prf"]
    num_samples: int
    """Frequencies m."""
    temperature: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("feature_map", self.feature_map, ("rks", "prf"))
        check_count("num_samples", self.num_samples)
        check_number("temperature", self.temperature, exclusive=True)

    def memory(self, key_dim: int, value_dim: int, stream: int) -> Memory:
        generator = np.random.default_rng([self.seed, stream])
        omega = generator.standard_normal((self.num_samples, key_dim))
        memory = _RksMemory if self.feature_map == "rks" else _PrfMemory
        return memory(omega, value_dim, self.temperature)


class _FeatureMemory(Memory):
    def __init__(self, omega: Array, value_dim: int, temperature: float) -> None:
        self.omega = omega
        self.scale = temperature**-0.5
        self.value_dim = value_dim

    def _quotient(self, sums: Array) -> Array:
        # An estimate of the normaliser can be 0. What follows from it is not a number, which no threshold lets pass.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return sums[:-1] / sums[-1]


class _RksMemory(_FeatureMemory):
    def __init__(self, omega: Array, value_dim: int, temperature: float) -> None:
        super().__init__(omega, value_dim, temperature)
        self.state = np.zeros((2 * len(omega), value_dim + 1))
        self.recent: dict[bytes, Array] = {}

    def _features(self, x: Array) -> Array:
        # A head stays among a few cells, and cosines and sines are most of the work.
        name = x.tobytes()
        if name not in self.recent:
            if len(self.recent) == RECENT:
                self.recent.pop(next(iter(self.recent)))
            angles = self.omega @ (x * self.scale)
            self.recent[name] = np.concatenate([np.cos(angles), np.sin(angles)])
        return self.recent[name]

    def append(self, key: Array, value: Array) -> None:
        self.state += np.outer(self._features(key), np.append(value, 1.0))

    def read(self, query: Array) -> Array:
        return self._quotient(self._features(query) @ self.state)


class _PrfMemory(_FeatureMemory):
    def __init__(self, omega: Array, value_dim: int, temperature: float) -> None:
        super().__init__(omega, value_dim, temperature)
        self.state = np.zeros((len(omega), value_dim + 1))
        self.largest = np.full(len(omega), -np.inf)

    def append(self, key: Array, value: Array) -> None:
        key = key * self.scale
        logs = self.omega @ key - np.square(key).sum()
        largest = np.maximum(self.largest, logs)
        self.state *= np.exp(self.largest - largest)[:, None]
        self.state += np.outer(np.exp(logs - largest), np.append(value, 1.0))
        self.largest = largest

    def read(self, query: Array) -> Array:
        # The term -|q|^2 is the same for all features and cancels.
        logs = self.omega @ (query * self.scale) + self.largest
        return self._quotient(np.exp(logs - logs.max()) @ self.state)
