"""What `--help` prints: at most 80 columns, options in groups, and of many groups the first one and the names of the
others; `--help GROUP` and `--help all` print the rest."""

import argparse
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import tyro

from klformer.lab.terminal import help_width

#: Commands with more options than this show one group at a time.
MANY = 40


def help_topic(arguments: Sequence[str]) -> str | None:
    """Return what is asked of the help: a group, "all", "" if nothing is said; None if no help is asked for."""
    places = [place for place, word in enumerate(arguments) if word in ("-h", "--help")]
    if not places:
        return None
    after = arguments[places[0] + 1 : places[0] + 2]
    return after[0] if after and not after[0].startswith("-") else ""


def help_of(options: type[Any], prog: str, topic: str, **default: Any) -> str:
    """Return the help of a command whose arguments are the fields of a dataclass; see `help_topic`."""
    with warnings.catch_warnings():
        # It is to be removed some day, and nothing takes its place yet: the one way to the texts of all options.
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(options, prog=prog, **default)
    groups = {str(group.title).removesuffix(" options"): group for group in parser._action_groups}
    groups = {name: group for name, group in groups.items() if group._group_actions}
    first = groups.pop("positional arguments", None)
    positional = [] if first is None else first._group_actions
    words = "".join(f" {action.metavar or action.dest}" for action in positional)
    lines = [f"usage: {prog}{words} [OPTIONS]", "", *_paragraphs(parser.description or "")]
    is_long = sum(len(group._group_actions) for group in groups.values()) > MANY
    if not is_long or topic == "all":
        shown = list(groups)
    else:
        shown = [name for name in groups if topic and (name == topic or name.startswith(f"{topic}."))] or ["options"]
    for action in positional:
        lines += _option(str(action.metavar or action.dest), action)
    for name in shown:
        title = "options" if name == "options" else f"--{name}.*"
        what = " ".join((groups[name].description or "").split())
        lines += ["", *textwrap.wrap(f"{title}: {what}".rstrip(), help_width())]
        for action in groups[name]._group_actions:
            flags = ", ".join(action.option_strings[:2]) or str(action.dest)
            lines += _option(f"{flags} {action.metavar or ''}".rstrip(), action)
    if is_long and shown == ["options"]:
        lines += ["", "groups of options:"]
        for name, group in groups.items():
            if name != "options":
                names = " ".join(action.option_strings[0].rpartition(".")[2] for action in group._group_actions)
                lines.append("  " + textwrap.shorten(f"--{name}.* {names}", help_width() - 2, placeholder=" ..."))
        lines += ["", f"{prog} --help GROUP says more of one, --help all of all."]
    return "\n".join(lines) + "\n"


def _option(title: str, action: argparse.Action) -> list[str]:
    text = " ".join(str(action.help or "").split())
    return [*_wrapped(title, "  ", "    "), *_wrapped(text, " " * 6, " " * 6)]


def _wrapped(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(text, help_width(), initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def _paragraphs(text: str) -> list[str]:
    """Wrap a description: paragraphs to the width, indented lines as examples, broken where a shell allows."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith("  ") or (lines and line.startswith((" klformer", "klformer ", "torchrun "))):
            lines += _wrapped(line.strip(), "  ", "      ")
        else:
            lines += textwrap.wrap(line, help_width()) or ([""] if lines and lines[-1] else [])
    return lines
