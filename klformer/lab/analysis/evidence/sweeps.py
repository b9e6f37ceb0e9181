"""Runs of a sweep: what tells those apart that have one setting, one attention and one seed."""

from collections.abc import Sequence
from typing import Any

from klformer.lab.runs.changes import LENGTH, MAY_CHANGE, flatten
from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.runs.naming import setting_and_start
from klformer.lab.runs.rates import FIELD as RATE

#: Fields that make no other result, and the learning rate: one is chosen for every model, and learned and frozen runs
#: are a pair whatever each of them took.
_UNNAMED = (MAY_CHANGE - LENGTH) | {RATE}


def swept_settings(configs: Sequence[ExperimentConfig]) -> list[str]:
    """For every run the setting with what was swept in it: `sparsity0.5-laptop training.resample_every=10`.

    A field was swept in a setting where runs of one attention and one seed differ in it. Without any, the setting is
    all there is.
    """
    settings = [setting_and_start(config) for config in configs]
    fields = [_fields(config) for config in configs]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for setting, config, values in zip(settings, configs, fields, strict=True):
        groups.setdefault((setting, config.attention.label(), config.seed), []).append(values)
    swept: dict[str, dict[str, None]] = {}
    for (setting, _, _), group in groups.items():
        differing = [name for name in group[0] if len({str(values.get(name)) for values in group}) > 1]
        swept.setdefault(setting, {}).update(dict.fromkeys(differing))
    return [
        " ".join([setting, *(f"{name}={values.get(name)}" for name in swept[setting])])
        for setting, values in zip(settings, fields, strict=True)
    ]


def _fields(config: ExperimentConfig) -> dict[str, Any]:
    """What a sweep may change, besides the attention, which rows name anyway."""
    tree = flatten(config.model_dump(mode="json", exclude={"attention"}))
    return {name: value for name, value in tree.items() if "." in name and name not in _UNNAMED}
