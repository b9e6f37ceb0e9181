"""What a command is, and what commands need to read their arguments."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from textwrap import wrap
from typing import Any, Generic, TypeVar, get_type_hints

import tyro

from klformer.checks import suggestion
from klformer.config import Config, NotAllowedError, describe_problems, reading_flags
from klformer.errors import ArgumentError
from klformer.lab.cli.help import help_of, help_topic
from klformer.lab.terminal import help_width
from klformer.registry import Registry

Options = TypeVar("Options")


@dataclass(frozen=True)
class Command(Generic[Options]):
    """How the arguments of a command are read, and what is done then.

    Args:
        parse: Takes the arguments and what was typed before them ("klformer train").
        run: Takes what `parse` gives.
    """

    parse: Callable[[Sequence[str], str], Options]
    run: Callable[[Options], None]


def plain_command(options: type[Options], run: Callable[[Options], None]) -> Command[Options]:
    """Make a command whose arguments are the fields of a dataclass."""
    return Command(lambda arguments, prog: read_options(options, arguments, prog), run)


def read_options(
    options: type[Options], arguments: Sequence[str], prog: str, *, default: Options | None = None
) -> Options:
    """Read arguments into a dataclass."""
    given: dict[str, Any] = {} if default is None else {"default": default}
    if (topic := help_topic(arguments)) is not None:
        print(help_of(options, prog, topic, **given), end="")
        raise SystemExit(0)
    try:
        with reading_flags():
            found, unread = tyro.cli(options, args=arguments, prog=prog, return_unknown_args=True, **given)
    except NotAllowedError as error:
        raise ArgumentError(describe_problems(error.problems, _section_of(error.config, default))) from None
    if unread:
        strange = next((part for part in unread if part.startswith("--")), unread[0]).partition("=")[0]
        hint = suggestion(strange, _flags(found)) or ";"
        raise ArgumentError(f"there is no option {strange!r}{hint} {prog} --help shows all of them")
    return found


def _section_of(config: type[Config], options: Any) -> str | None:
    """Return the section of options that is made of this kind of configuration."""
    named = ((field.name, getattr(options, field.name)) for field in fields(options)) if options is not None else ()
    return next((name for name, value in named if isinstance(value, config)), None)


def _flags(options: Any, section: str = "--") -> Iterator[str]:
    """Yield the flags that options are read from."""
    is_config = isinstance(options, Config)
    for name in type(options).model_fields if is_config else [field.name for field in fields(options)]:
        value, flag = getattr(options, name), section + name.replace("_", "-")
        if isinstance(value, Config) or is_dataclass(value):
            yield from _flags(value, f"{flag}.")
        else:
            yield flag


def group(description: str, modules: Registry[str]) -> Command[Any]:
    """Make a command of commands."""

    def parse(arguments: Sequence[str], prog: str) -> Callable[[], None]:
        if arguments and not arguments[0].startswith("-"):
            command = _command_of(modules[arguments[0]])
            options = command.parse(arguments[1:], f"{prog} {arguments[0]}")
            return lambda: command.run(options)
        lines = [f"usage: {prog} NAME [OPTIONS]", "", *wrap(description, help_width())]
        lines += [f"`{prog} NAME --help` says more.", ""]
        for name in modules:
            what = (_options_of(import_module(modules[name]).run).__doc__ or "").strip().partition("\n\n")[0]
            lines += wrap(f"  {name:12s} {' '.join(what.split())}", help_width(), subsequent_indent=" " * 15)
        print("\n".join(lines))
        raise SystemExit(0 if arguments else 2)

    return Command(parse, lambda chosen: chosen())


def peek(arguments: Sequence[str], **defaults: str | None) -> argparse.Namespace:
    """Return the values of some flags, on which the defaults of all others depend, before all are read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default)
    return parser.parse_known_args(arguments)[0]


def is_given(arguments: Sequence[str], flag: str) -> bool:
    """Return whether a flag that is on or off was set to on, before all are read."""
    words = [f"--{flag}", f"--no-{flag}"]
    given = [argument for argument in arguments if argument in words]
    return bool(given) and given[-1] == words[0]


def _command_of(module: str) -> Command[Any]:
    run = import_module(module).run
    return plain_command(_options_of(run), run)


def _options_of(run: Callable[[Any], None]) -> type:
    """Return the type of the argument of `run`."""
    return get_type_hints(run)["options"]
