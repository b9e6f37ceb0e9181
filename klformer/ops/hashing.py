"""Random numbers as a pure function of integers: the same on every device, whatever else is asked for."""

import torch
from torch import Tensor

# The finaliser of SplitMix64 (Steele et al. 2014), as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def hashed_uniform(*numbers: Tensor | int) -> Tensor:
    """A float32 in [0, 1) for every combination of the (broadcast) integers; 24 bits, exact on every device."""
    state: Tensor | None = None
    for number in numbers:
        mixed = number if state is None else state + number
        state = _mix(torch.as_tensor(mixed, dtype=torch.int64))
    assert state is not None, "nothing to hash"
    return ((state >> 40) & (2**24 - 1)).float() / 2**24


def _mix(x: Tensor) -> Tensor:
    """Multiplications wrap around; shifts must not repeat the sign, so that it is cut off."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
