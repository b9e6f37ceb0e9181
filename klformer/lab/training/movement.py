"""How far the kernels have moved since the start, measured at every validation."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from klformer.kernels import Kernel
from klformer.kernels.movement import Movement, kernel_movement
from klformer.lab.training.callbacks import Callback


class KernelMovement(Callback):
    """Notes the relative change of frequencies and kernels, from the weights that the model has now.

    Args:
        model: With the weights of the start.
    """

    name: ClassVar[str] = "kernel_movement"

    def __init__(self, model: nn.Module) -> None:
        # Device and precision change with the model, which copies would not follow: they are made when measured.
        self._kernels = {name: module for name, module in model.named_modules() if isinstance(module, Kernel)}
        self._start = {
            name: {key: value.detach().cpu().clone() for key, value in kernel.state_dict().items()}
            for name, kernel in self._kernels.items()
            if kernel.spectrum is not None
        }

    def measure(self) -> Mapping[str, float]:
        """Means over the layers, for the record of a validation; nothing for models without frequencies."""
        layers = self._layers()
        if not layers:
            return {}
        return {
            "kernel_frequencies_moved": sum(layer.frequencies for layer in layers) / len(layers),
            "kernel_moved": sum(layer.kernel for layer in layers) / len(layers),
        }

    def result(self) -> dict[str, Any]:
        by_layer = [{"frequencies": layer.frequencies, "kernel": layer.kernel} for layer in self._layers()]
        return {**self.measure(), "kernel_movement_by_layer": by_layer} if by_layer else {}

    def _layers(self) -> list[Movement]:
        found = []
        for name, state in self._start.items():
            start = copy.deepcopy(self._kernels[name])
            start.load_state_dict(state)
            movement = kernel_movement(start, self._kernels[name])
            assert movement is not None, "only kernels with frequencies are kept"
            found.append(movement)
        return found
