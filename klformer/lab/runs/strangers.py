"""Runs of other people: what their configuration may ask of this machine before anybody has looked at it.

A configuration is believed as far as the weights beside it bear it out: sizes are compared with the header of the
weights before anything of that size is made. Data is generated in the cache and in the run's own folder; elsewhere, or
in great numbers, only if the user names the place.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from klformer.errors import RunError
from klformer.lab.runs.build import build_model
from klformer.lab.runs.changes import flatten
from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.tasks import DataConfig, Task
from klformer.lab.training.checkpoint import check_shapes

#: A size up to this is harmless, whether the model has a tensor of it or not.
HARMLESS = 10_000
#: More examples, or longer sequences, are not generated for a run that was only to be read.
MOST = 10**7


def check_model_sizes(
    config: ExperimentConfig, task: Task, shapes: Mapping[str, tuple[int, ...]], source: Path
) -> None:
    """Compare the model that a configuration describes with the shapes of weights, without making either."""
    _check_most(config)
    numbers = sum(map(prod, shapes.values()))
    # Every size that a model has is a size of one of its tensors, or their number.
    for name, value in flatten({"model": config.model.model_dump(), "attention": config.attention.options}).items():
        if _is_size(value) and value > max(numbers, HARMLESS):
            raise RunError(f"{source} does not fit the configuration: {name} is {value:,}, it has {numbers:,} numbers")
    with torch.device("meta"):
        model = build_model(config, task)
    check_shapes(shapes, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, source)


def may_generate(task: Task, run: Path) -> bool:
    """Whether data of a run may be generated where its configuration says."""
    place = task.root.resolve()
    return any(place.is_relative_to(folder.resolve()) for folder in (DataConfig().folder(), run))


def _check_most(config: ExperimentConfig) -> None:
    for name, value in flatten(config.data.model_dump()).items():
        if _is_size(value) and name != "seed" and value > MOST:
            raise RunError(
                f"the configuration asks for data.{name} = {value:,}, more than a run is read with ({MOST:,}); "
                "change its config.json if that is meant"
            )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
