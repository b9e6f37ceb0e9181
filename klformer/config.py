"""What every configuration is: frozen, validated, strict about unknown keys, and explained in one line if wrong."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Config(BaseModel):
    """Frozen, validated, and strict about unknown keys. Docstrings of fields are the help of the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def describe_problems(error: ValidationError) -> str:
    """What is wrong with a configuration, in one line: each field, what it was given, and why not."""
    problems = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        given = "" if isinstance(item["input"], dict) or item["type"] == "missing" else f", got {item['input']!r}"
        problems.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{given}" if where else item["msg"])
    return "; ".join(problems)
