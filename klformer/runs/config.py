"""The whole description of an experiment: one frozen tree, JSON in and out, unknown keys refused."""

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from klformer.errors import ArgumentError
from klformer.attention import attention_options
from klformer.attention.base import ATTENTIONS
from klformer.checks import suggestion
from klformer.tasks import TASKS, DataConfig
from klformer.config import Config, describe_problems
from klformer.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig

#: Not one inside of a list: hidden_dims=[8,8].
COMMA_BETWEEN_OPTIONS = re.compile(r",(?![^\[]*\])")

OptionValue = bool | int | float | str | None | tuple[int, ...]


class AttentionConfig(Config):
    """An attention and its options."""

    name: str
    options: dict[str, OptionValue] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return ATTENTIONS.check(name)

    @staticmethod
    def parse(text: str) -> "AttentionConfig":
        """ "gmm-prf" or "gmm-prf:frozen=true,num_frequencies=64": a name, and options as JSON values or plain words.

        Raises:
            ValueError: an option is not of the form key=value, or the attention does not have it.
        """
        name, _, rest = text.partition(":")
        options: dict[str, OptionValue] = {}
        for item in filter(None, COMMA_BETWEEN_OPTIONS.split(rest)):
            key, equals, value = item.partition("=")
            if not equals:
                raise ArgumentError(f"attention options look like key=value, got {item!r} in {text!r}")
            if key in options:
                raise ArgumentError(f"an option is given once, got {key!r} twice in {text!r}")
            options[key] = _json_or_word(value)
        config = AttentionConfig(name=name, options=options)
        known = attention_options(name)
        for key in options:
            if key not in known:
                raise ArgumentError(f"{name} has no option {key!r}{suggestion(key, known)} Options: {', '.join(known)}")
        return config

    def label(self) -> str:
        """The text that `parse` takes, for tables and folder names."""
        options = ",".join(f"{key}={_written(value)}" for key, value in sorted(self.options.items()))
        return f"{self.name}:{options}" if options else self.name


class ModelConfig(Config):
    """Sizes of the Transformer."""

    num_layers: int = Field(2, ge=1)
    """Blocks of the encoder."""

    num_heads: int = Field(4, ge=1)
    """Heads H."""

    model_dim: int = Field(64, ge=1)
    """Size of a token."""

    head_dim: int = Field(16, ge=1)
    """Size of queries, keys and values of a head."""

    ffn_dim: int = Field(128, ge=1)
    """Hidden size of the feed-forward part."""

    head_hidden_dim: int = Field(128, ge=2)
    """Hidden size of the classifier."""

    pair_features: Literal["concat", "difference"] = "concat"
    """What the classifier of a pair sees: both vectors, or also the absolute value of their difference."""

    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout."""

    activation: Literal["gelu", "relu"] = "gelu"
    """Activation of the feed-forward part."""

    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Position embedding."""

    checkpoint_layers: bool = False
    """Compute the inside of layers again in backward, to save memory."""


class ExperimentConfig(Config):
    """Everything that a run depends on."""

    task: str
    preset: str
    attention: AttentionConfig
    data: DataConfig
    model: ModelConfig
    optimiser: OptimiserConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    seed: int = Field(0, ge=0)

    @field_validator("task")
    @classmethod
    def _known(cls, name: str) -> str:
        return TASKS.check(name)

    @field_validator("attention")
    @classmethod
    def _complete(cls, attention: AttentionConfig) -> AttentionConfig:
        """With all options: a default that changes later must not change a run that is loaded then."""
        return AttentionConfig(name=attention.name, options=attention_options(attention.name) | attention.options)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_file(path: Path) -> "ExperimentConfig":
        """Read what `to_json` wrote.

        Raises:
            ValueError: the file is not a valid configuration; the message names it and what is wrong.
        """
        try:
            return ExperimentConfig.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ArgumentError(f"{path}: {describe_problems(error)}") from error


def _json_or_word(text: str) -> Any:
    # Python's words as well as JSON's.
    python = {"True": "true", "False": "false", "None": "null"}
    try:
        return json.loads(python.get(text, text))
    except json.JSONDecodeError:
        return text


def _written(value: OptionValue) -> str:
    return json.dumps(value, separators=(",", ":")).strip('"')
