"""The fast Walsh-Hadamard transform: H x in d log2(d) additions, H the unnormalised Sylvester matrix of +1 and -1."""

import torch
from torch import Tensor

from klformer.errors import ArgumentError


def hadamard_transform(x: Tensor) -> Tensor:
    """H x along the last dimension (size a power of two); H is symmetric and H H = d I.

    Raises:
        ValueError: if the last size is not a power of two.
    """
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise ArgumentError(f"the last size must be a power of two, got {size}")
    shape = x.shape
    half = 1
    while half < size:
        even, odd = x.reshape(*shape[:-1], size // (2 * half), 2, half).unbind(-2)
        x = torch.stack([even + odd, even - odd], dim=-2)
        half *= 2
    return x.reshape(shape)


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
