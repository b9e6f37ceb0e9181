"""Reading the command line: commands of a command by name, and flags on which the defaults of others depend."""

import argparse
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


def peek(arguments: Sequence[str], **defaults: str | None) -> argparse.Namespace:
    """The values of some flags, on which the defaults of all others depend, before all are read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default)
    return parser.parse_known_args(arguments)[0]
