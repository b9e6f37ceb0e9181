"""What is drawn at random, and when: noise lives in persistent buffers, and changes only when somebody says so.

A state dict therefore reproduces a model bit for bit. Draws come from the generator that is given, so that equal
generators give equal noise on every device and every rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Resampled(nn.Module, ABC):
    """A module with noise in persistent buffers, which `klformer.resample` draws again.

    With `redraw` False it keeps the draw that it was built with: it is deterministic, and still random features.
    """

    redraw: bool = True

    @abstractmethod
    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw new noise into the buffers, in place. The same generator state gives the same noise on any device."""


def resample(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw new noise for every module in `module` that has some, in the order of its modules.

    That is spectral distributions, and the hashes of reformer. With equally seeded generators, equal models draw equal
    noise: this is how the ranks of a distributed run stay together.
    """
    for child in module.modules():
        if isinstance(child, Resampled) and child.redraw:
            child.resample(generator)


@contextmanager
def kept_noise(module: nn.Module) -> Iterator[None]:
    """Whatever is drawn inside, the noise of `module` is as before afterwards."""
    saved = [
        (buffer, buffer.clone())
        for child in module.modules()
        if isinstance(child, Resampled)
        for buffer in child.buffers()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in saved:
                buffer.copy_(before)


def has_noise(module: nn.Module) -> bool:
    """Whether `resample` changes anything in the module."""
    return any(isinstance(child, Resampled) and child.redraw for child in module.modules())
