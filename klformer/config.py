"""What every configuration is: frozen, validated, strict about unknown keys, and explained in one line if wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from klformer.errors import ArgumentError

#: Whether configurations are being made of a command line.
_reading_flags: ContextVar[bool] = ContextVar("reading_flags", default=False)


class NotAllowedError(Exception):
    """A configuration that is not allowed, while a command line is read. Not a ValueError: the library that reads it
    would put that into a box, without the flag that was typed."""

    def __init__(self, config: type["Config"], problems: ValidationError) -> None:
        super().__init__(describe_problems(problems))
        self.config, self.problems = config, problems


@contextmanager
def reading_flags() -> Iterator[None]:
    """Configurations that are made here raise NotAllowedError for what is not allowed."""
    token = _reading_flags.set(True)
    try:
        yield
    finally:
        _reading_flags.reset(token)


class Config(BaseModel):
    """Frozen, validated, and strict about unknown keys. Docstrings of fields are the help of the command line.

    Calling the class raises ArgumentError, in one line, for what is not allowed. `model_validate` and its kind raise
    pydantic's ValidationError, which knows where in a tree of configurations the problem is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            if _reading_flags.get():
                raise NotAllowedError(type(self), error) from None
            # Pydantic's own message is a box with a link that says the same.
            raise ArgumentError(describe_problems(error)) from None

    # Pydantic validates nested configurations without calling this method then, and keeps the place of a problem.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def describe_problems(error: ValidationError, section: str | None = None) -> str:
    """What is wrong with a configuration, in one line: each field, what it was given, and why not.

    Args:
        section: The section of a command line that it is, if fields are to be named by their flags.
    """
    problems = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if where and section is not None:
            where = f"--{section}.{where.replace('_', '-')}"
        given = "" if isinstance(item["input"], dict) or item["type"] == "missing" else f", got {item['input']!r}"
        message = item["msg"].removeprefix("Value error, ")
        problems.append(f"{where}: {message}{given}" if where else message)
    return "; ".join(problems)
