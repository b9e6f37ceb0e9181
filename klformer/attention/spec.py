"""An attention by name with its options, as a value: text and JSON in and out."""

import json
import re
from typing import Any

from pydantic import Field, field_serializer, field_validator, model_validator

from klformer.attention.base import AttentionMechanism
from klformer.attention.registry import attention_options, build_attention, unknown_option
from klformer.config import Config
from klformer.errors import ArgumentError

#: Not one inside of a list: hidden_dims=[8,8].
COMMA_BETWEEN_OPTIONS = re.compile(r",(?![^\[]*\])")

#: The option that says who computes.
BACKEND = "backend"

OptionValue = bool | int | float | str | None | tuple[int, ...]


class AttentionSpec(Config):
    """An attention and its options; those that are not given have their defaults.

    Raises:
        ArgumentError: there is no such attention or option.

    Examples:
        >>> import klformer
        >>> spec = klformer.AttentionSpec.parse("gmm-prf:frozen=true,num_frequencies=64")
        >>> spec.name, spec.options
        ('gmm-prf', {'frozen': True, 'num_frequencies': 64})
        >>> spec.label()
        'gmm-prf:frozen=true,num_frequencies=64'
        >>> spec == klformer.AttentionSpec.of(spec.label())
        True
        >>> spec.complete().options["covariance"]
        'diagonal'
        >>> attention = spec.build(num_heads=2, head_dim=8)
    """

    name: str
    """Name of the attention; see `attention_names()`."""

    options: dict[str, OptionValue] = Field(default_factory=dict)
    """Options of the attention; see `attention_options(name)`."""

    @model_validator(mode="after")
    def _check_names(self) -> "AttentionSpec":
        if problem := unknown_option(self.name, self.options):
            raise ArgumentError(problem)
        return self

    @field_validator("options")
    @classmethod
    def _unless_chosen(cls, options: dict[str, OptionValue]) -> dict[str, OptionValue]:
        """Return the options without a backend that nobody has chosen: it is as if it were not there."""
        return {key: value for key, value in options.items() if (key, value) != (BACKEND, "auto")}

    @field_serializer("options")
    def _lasting(self, options: dict[str, OptionValue]) -> dict[str, OptionValue]:
        """Return what a file keeps."""
        return {key: value for key, value in options.items() if key != BACKEND}

    @staticmethod
    def parse(text: str) -> "AttentionSpec":
        """An attention from text: a name, and options as JSON values or plain words.

        Args:
            text: Like "gmm-prf" or "gmm-prf:frozen=true,num_frequencies=64".

        Raises:
            ArgumentError: an option is not of the form key=value, or there is no such attention or option.
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
        return AttentionSpec(name=name, options=options)

    @staticmethod
    def of(value: Any) -> "AttentionSpec":
        """The attention that a user means.

        Args:
            value: Text as in `parse`, a dict from JSON, or a spec, which is given back.

        Raises:
            ArgumentError: it is none of these, or there is no such attention or option.
        """
        match value:
            case AttentionSpec():
                return value
            case str():
                return AttentionSpec.parse(value)
            case dict():
                return AttentionSpec(**value)
        raise ArgumentError(f"attention must be text, like 'gmm-rks:frozen=true', or AttentionSpec, got {value!r}")

    def label(self) -> str:
        """The text that `parse` takes, for tables and folder names."""
        options = ",".join(f"{key}={_written(value)}" for key, value in sorted(self.options.items()))
        return f"{self.name}:{options}" if options else self.name

    def complete(self) -> "AttentionSpec":
        """The same with all options written out: a default that changes later does not change it.

        But for the backend: who computes is a matter of the machine, and no file keeps it.
        """
        return AttentionSpec(name=self.name, options=attention_options(self.name) | self.options)

    def build(
        self, *, num_heads: int, head_dim: int, value_dim: int | None = None, max_len: int | None = None
    ) -> AttentionMechanism:
        """The attention at these sizes; see `build_attention`.

        Args:
            num_heads: Heads H.
            head_dim: Size D of queries and keys.
            value_dim: Size E of values; D if None.
            max_len: Longest sequence that will be seen; only some attentions need it.

        Raises:
            ArgumentError: a size or an option is not allowed.
        """
        return build_attention(
            self.name, num_heads=num_heads, head_dim=head_dim, value_dim=value_dim, max_len=max_len, **self.options
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
