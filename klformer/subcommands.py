"""Commands of a command, by name: `klformer bench NAME` and `klformer analyze NAME`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

#: Options of a command, and what to do with them.
Subcommand = tuple[type, Callable[[Any], None]]


def run_subcommand(
    commands: Mapping[str, Subcommand], arguments: Sequence[str], *, group: str, description: str
) -> None:
    """Read the options of the command that the first argument names, and run it."""
    choice = tyro.extras.subcommand_cli_from_dict(
        {name: options for name, (options, _) in commands.items()},
        args=list(arguments),
        prog=f"klformer {group}",
        description=f"{description} `klformer {group} NAME --help` says more.",
    )
    for options, run in commands.values():
        if isinstance(choice, options):
            run(choice)
