"""What is drawn at random, and when: noise lives in persistent buffers, and changes only when somebody says so.

A state dict therefore reproduces a model bit for bit. Draws come from the generator that is given, so that equal
generators give equal noise on every device and every rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn


class Resampled(nn.Module, ABC):
    """A module with noise in persistent buffers, which `klformer.resample` draws again.

    With `redraw` False it keeps the draw that it was built with: it is deterministic, and still random features.
    """

    redraw: bool = True

    def __init_subclass__(cls) -> None:
        if (draw := vars(cls).get("resample")) is not None:

            @wraps(draw)
            @torch.no_grad()
            def resample(self: Resampled, generator: torch.Generator | None = None) -> None:
                if self.redraw:
                    draw(self, generator)

            cls.resample = resample  # type: ignore[method-assign]

    @abstractmethod
    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw new noise into the buffers, in place. The same generator state gives the same noise on any device.

        Without effect where `redraw` is False: whoever calls it, a draw that is kept is kept.

        Args:
            generator: On the CPU; torch's own if None.
        """

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Says what another size of the noise means, after torch has named it."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        errors: list[str] = rest[-1]
        for name, buffer in self.named_buffers(recurse=False):
            found = state_dict.get(f"{prefix}{name}")
            if found is not None and found.shape != buffer.shape:
                options = {key: getattr(self, key) for key in ("num_frequencies", "head_dim") if hasattr(self, key)}
                here = ", ".join(f"{key}={value}" for key, value in options.items()) or type(self).__name__
                errors.append(
                    f"{prefix}{name} is noise of the shape {tuple(found.shape)} in the weights and "
                    f"{tuple(buffer.shape)} here, with {here}: "
                    "the weights were made with another num_frequencies, or another option that it "
                    "depends on. Build the model with that one; or keep its own draw and load the rest: "
                    "load_state_dict(klformer.without_noise(weights, model), strict=False)"
                )


def resample(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw new noise for every module in `module` that has some, in the order of its modules.

    That is spectral distributions, and the hashes of reformer. With equally seeded generators, equal models draw equal
    noise: this is how the ranks of a distributed run stay together.

    Args:
        module: A model, a layer or an attention; what has no noise, or keeps its draw (`redraw=False`), is left alone.
        generator: On the CPU; torch's own if None.

    Examples:
        >>> import torch, klformer
        >>> attention = klformer.build_attention("gmm-rks", num_heads=1, head_dim=4, num_frequencies=8)
        >>> before = attention.kernel.spectrum.frequencies()
        >>> klformer.resample(attention, torch.Generator().manual_seed(1))
        >>> torch.equal(before, attention.kernel.spectrum.frequencies())
        False
    """
    for child in module.modules():
        if isinstance(child, Resampled):
            child.resample(generator)


def without_noise(weights: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """The weights but for the noise, for a module that keeps its own draw: of another size, or for a new one.

    Load them with `strict=False`.

    Args:
        weights: A state dict.
        module: A module of the kind that the weights are of; it says what is noise.

    Returns:
        The state dict without its noise.

    Examples:
        >>> import klformer
        >>> small = klformer.build_attention("gmm-rks", num_heads=1, head_dim=4, num_frequencies=8)
        >>> large = klformer.build_attention("gmm-rks", num_heads=1, head_dim=4, num_frequencies=64)
        >>> large.load_state_dict(klformer.without_noise(small.state_dict(), small), strict=False)
        _IncompatibleKeys(missing_keys=['kernel.spectrum.noise'], unexpected_keys=[])
    """
    noise = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, child in module.named_modules()
        if isinstance(child, Resampled)
        for name, _ in child.named_buffers(recurse=False)
    }
    return {name: tensor for name, tensor in weights.items() if name not in noise}


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
