"""The shape of a problem of the op benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Shape of a problem, in the letters of the project."""

    batch: int
    heads: int
    length: int
    head_dim: int
    value_dim: int
    frequencies: int

    def result_and_gradients(self) -> int:
        """Bytes in float32 of the result and of the gradients of queries, keys and values."""
        return 4 * self.batch * self.heads * self.length * 2 * (self.head_dim + self.value_dim)
