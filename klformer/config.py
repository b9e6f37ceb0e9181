"""What every configuration is: frozen, validated, strict about unknown keys, and explained in one line if wrong."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from klformer.errors import ArgumentError


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
            # Pydantic's own message is a box with a link that says the same.
            raise ArgumentError(describe_problems(error)) from None

    # Pydantic validates nested configurations without calling this method then, and keeps the place of a problem.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def describe_problems(error: ValidationError) -> str:
    """What is wrong with a configuration, in one line: each field, what it was given, and why not."""
    problems = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        given = "" if isinstance(item["input"], dict) or item["type"] == "missing" else f", got {item['input']!r}"
        message = item["msg"].removeprefix("Value error, ")
        problems.append(f"{where}: {message}{given}" if where else message)
    return "; ".join(problems)
