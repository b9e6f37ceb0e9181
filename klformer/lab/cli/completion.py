"""`klformer completion`: a script for the shell, with all commands, their options, attentions and tasks."""

import contextlib
import io
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import tyro

from klformer.attention import attention_names
from klformer.lab.cli.command import plain_command
from klformer.lab.tasks import task_names


@dataclass(frozen=True)
class Completion:
    """Print a script that completes commands, options, attentions and tasks.

    Examples:

      klformer completion bash > ~/.local/share/bash-completion/completions/klformer
      klformer completion fish > ~/.config/fish/completions/klformer.fish
      echo 'eval "$(klformer completion zsh)"' >> ~/.zshrc
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


#: Whose values are known.
_VALUES = {"attention": attention_names, "attentions": attention_names, "task": task_names, "tasks": task_names}

_BASH = """\
_klformer() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} words
  case ${{COMP_WORDS[COMP_CWORD-1]}} in
{values}
  *) case ${{COMP_WORDS[1]}} in
{commands}
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{names}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _klformer klformer
"""


def print_completion(options: Completion) -> None:
    """Print the script."""
    from klformer.lab.cli.main import COMMANDS

    words = {name: _words(name) for name in COMMANDS}
    if options.shell == "fish":
        print(f"complete -c klformer -n __fish_use_subcommand -f -a '{' '.join(words)}'")
        for name, some in words.items():
            for word in some:
                known = _VALUES.get(word.removeprefix("--"))
                values = f" -x -a '{' '.join(known())}'" if known else ""
                option = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
                print(f"complete -c klformer -n '__fish_seen_subcommand_from {name}' {option}{values}")
        return
    values = "\n".join(f'  --{flag}) words="{" ".join(known())}" ;;' for flag, known in _VALUES.items())
    commands = "\n".join(f'    {name}) words="{" ".join(some)}" ;;' for name, some in words.items())
    if options.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(_BASH.format(values=values, commands=commands, names=" ".join(words)), end="")


def _words(name: str) -> list[str]:
    """Return the options of a command, and the names of what is below it, as its help has them."""
    from klformer.lab.cli.main import COMMANDS

    module = import_module(COMMANDS[name].module)
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.suppress(SystemExit):
        module.COMMAND.parse(
            ["--task", "csv", "--help", "all"] if name in ("train", "compare") else ["--help", "all"], ""
        )
    below = r"^  ([a-z]\w*) " if name in ("analyze", "bench") else r"(?!)"
    text = found.getvalue()
    return [*re.findall(below, text, re.M), *re.findall(r"^  (?:-h, )?(--[\w.-]+)", text, re.M)]


COMMAND = plain_command(Completion, print_completion)
