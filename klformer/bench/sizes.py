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
