"""What a benchmark writes: its rows with the environment and the command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from klformer.files import write_json
from klformer.lab.environment import typed_command


def make_report(environment: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a benchmark found, with where it was measured and the command that was typed."""
    return {"environment": environment, "command": typed_command(), **content}


def write_report(
    path: Path | None, environment: Mapping[str, Any], content: Mapping[str, Any], console: Console
) -> None:
    """Write the report where it was asked for, and say so.

    Args:
        path: The file; None writes nothing.
        environment: What `describe_machine` said.
        content: With rows as "results", and what else belongs to them.

    Raises:
        FileError: it can't be written.
    """
    if path is not None:
        write_json(path, make_report(environment, content))
        console.print(f"figures written to {path}")
