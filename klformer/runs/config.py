"""The whole description of an experiment: one frozen tree, JSON in and out, unknown keys refused."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, ValidationInfo, field_validator

from klformer.attention import attention_names, attention_options
from klformer.checks import suggestion
from klformer.config import Config, describe_problems
from klformer.errors import ArgumentError, RunError
from klformer.tasks import TASKS, DataConfig, task_names
from klformer.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig

#: Not one inside of a list: hidden_dims=[8,8].
COMMA_BETWEEN_OPTIONS = re.compile(r",(?![^\[]*\])")

#: Of run folders; a folder of another is refused by its number.
FORMAT: Literal[2] = 2

OptionValue = bool | int | float | str | None | tuple[int, ...]


class AttentionConfig(Config):
    """An attention and its options."""

    name: str
    options: dict[str, OptionValue] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in attention_names():
            known = ", ".join(attention_names())
            raise ArgumentError(f"unknown attention {name!r}{suggestion(name, attention_names())} Known: {known}")
        return name

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

    format: Literal[2] = FORMAT
    task: str
    preset: str
    attention: AttentionConfig
    data: SerializeAsAny[DataConfig]
    model: ModelConfig
    optimiser: OptimiserConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    seed: int = Field(0, ge=0)

    @field_validator("task")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in task_names():
            raise ArgumentError(
                f"unknown task {name!r}{suggestion(name, task_names())} Known: {', '.join(task_names())}"
            )
        return name

    @field_validator("attention")
    @classmethod
    def _complete(cls, attention: AttentionConfig) -> AttentionConfig:
        """With all options: a default that changes later must not change a run that is loaded then."""
        return AttentionConfig(name=attention.name, options=attention_options(attention.name) | attention.options)

    @field_validator("data", mode="before")
    @classmethod
    def _of_the_task(cls, data: Any, info: ValidationInfo) -> Any:
        """An instance of the task's own class."""
        if "task" not in info.data:  # which is wrong itself
            return data
        kind = TASKS[info.data["task"]].data_config
        if isinstance(data, DataConfig):
            if not isinstance(data, kind):
                raise ArgumentError(f"must be a {kind.__name__}, got a {type(data).__name__}")
            return data
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            raise ArgumentError(describe_problems(error)) from error

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_file(path: Path) -> "ExperimentConfig":
        """Read what `to_json` wrote.

        Raises:
            ValueError: the file is not a valid configuration; the message names it and what is wrong.
            RunError: it is of another format.
        """
        content = path.read_bytes()
        with suppress(ValueError):  # which the next line says in its own words
            check_format(json.loads(content), path.parent)
        try:
            return ExperimentConfig.model_validate_json(content)
        except ValidationError as error:
            raise ArgumentError(f"{path}: {describe_problems(error)}") from error


def check_format(config: Any, folder: Path) -> None:
    """Look at a configuration that was read as JSON, before anything else of it is believed.

    Raises:
        RunError: it is of another format; runs were without a number before they had one.
    """
    found = config.get("format", 1) if isinstance(config, dict) else FORMAT
    if found != FORMAT:
        raise RunError(
            f"{folder} has format {found}, this klformer reads format {FORMAT}; read it with the version that wrote "
            "it, or train it again"
        )


def _json_or_word(text: str) -> Any:
    # Python's words as well as JSON's.
    python = {"True": "true", "False": "false", "None": "null"}
    try:
        return json.loads(python.get(text, text))
    except json.JSONDecodeError:
        return text


def _written(value: OptionValue) -> str:
    return json.dumps(value, separators=(",", ":")).strip('"')
