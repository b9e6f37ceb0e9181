"""Sweeps: the same run with other values of some fields, each with a name that says which."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from klformer.checks import suggestion
from klformer.config import describe_problems
from klformer.errors import ArgumentError
from klformer.lab.runs.changes import flatten
from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.runs.naming import run_name


@dataclass(frozen=True)
class Variant:
    """A run of a comparison.

    Args:
        config: What it is.
        label: What tells it from others of its attention and seed: `model.dropout=0.1`; nothing without a sweep.
    """

    config: ExperimentConfig
    label: str = ""

    @property
    def name(self) -> str:
        """The name of its folder."""
        name = run_name(self.config)
        return f"{name}-{self.label.replace(' ', '-').replace('/', '_')}" if self.label else name


def variants(config: ExperimentConfig, sweeps: Sequence[str]) -> list[Variant]:
    """Return the configuration with every combination of the values that are given.

    Args:
        sweeps: Like "model.dropout=0,0.1,0.3" or "attention.num_frequencies=32,64", each field once.
    """
    parsed = [_parse(text) for text in sweeps]
    fields = [field for field, _ in parsed]
    if len(set(fields)) < len(fields):
        raise ArgumentError(f"every field is swept once, got {', '.join(fields)}")
    found = []
    for values in product(*(values for _, values in parsed)):
        chosen = dict(zip(fields, values, strict=True))
        label = " ".join(f"{field}={value}" for field, value in chosen.items())
        found.append(Variant(_changed(config, chosen), label))
    return found


def _parse(text: str) -> tuple[str, list[str]]:
    field, equals, values = text.partition("=")
    if not equals or not all(values.split(",")):
        raise ArgumentError(f"a sweep looks like model.dropout=0,0.1,0.3, got {text!r}")
    if field == "seed":
        raise ArgumentError("seeds are given by --seeds, not by a sweep")
    return field.replace("-", "_"), values.split(",")


def _changed(config: ExperimentConfig, chosen: dict[str, str]) -> ExperimentConfig:
    tree = config.model_dump(mode="json")
    tree["attention"] |= tree["attention"].pop("options")
    known = [name for name in flatten(tree) if "." in name and name != "attention.name"]
    for field, value in chosen.items():
        if field not in known:
            raise ArgumentError(f"there is no field {field!r} to sweep over{suggestion(field, known)}")
        section, _, key = field.partition(".")
        tree[section][key] = _json_or_word(value)
    attention = tree["attention"]
    tree["attention"] = {"name": attention.pop("name"), "options": attention}
    try:
        return ExperimentConfig.model_validate(tree)
    except ValidationError as error:
        raise ArgumentError(f"sweep {chosen}: {describe_problems(error)}") from error


def _json_or_word(text: str) -> Any:
    try:
        return json.loads({"None": "null", "True": "true", "False": "false"}.get(text, text))
    except json.JSONDecodeError:
        return text
