"""The command `klformer`: its table of commands, what is typed before a command, and what becomes of errors.

A command's module is imported when the command is called, so that `--version`, `--help` and a misspelt command answer
at once. This file imports only what is quick.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from textwrap import wrap
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import klformer
from klformer.checks import unknown
from klformer.errors import ArgumentError, ArgumentTypeError, Interrupted, OtherProcessFailedError, UserError

if TYPE_CHECKING:
    from klformer.lab.cli.command import Command


class Entry(NamedTuple):
    """A command in the table: the module that has it as COMMAND, and what `klformer --help` says of it."""

    module: str
    summary: str


COMMANDS = {
    "train": Entry("klformer.lab.cli.train", "train a Transformer with one attention on one task"),
    "pretrain": Entry("klformer.lab.cli.pretrain", "pretrain by guessing hidden tokens, of texts or of a task"),
    "glue": Entry("klformer.lab.cli.glue", "fine-tune on the tasks of GLUE, and print one table beside the paper's"),
    "compare": Entry("klformer.lab.cli.compare", "train several attentions over several seeds, and print one table"),
    "convert": Entry(
        "klformer.lab.cli.convert", "replace the softmax attention of a trained model by a learned kernel"
    ),
    "export": Entry("klformer.lab.cli.export", "write an encoder, converted or softmax, as an ONNX file"),
    "demo": Entry(
        "klformer.lab.cli.demo", "train a small softmax model and replace its attention: what is kept, in a minute"
    ),
    "eval": Entry("klformer.lab.cli.evaluate", "evaluate a run, averaged over draws of its frequencies"),
    "predict": Entry("klformer.lab.cli.predict", "predict the labels of rows without them, with a run"),
    "curves": Entry("klformer.lab.cli.curves", "draw the learning curves of runs"),
    "profile": Entry("klformer.lab.cli.profile", "memory and time of one training step of a preset's model"),
    "report": Entry("klformer.lab.cli.report", "write runs as one page for a browser, beside the paper's figures"),
    "analyze": Entry(
        "klformer.lab.cli.analyze", "check the paper's claims on runs: `klformer analyze --help` names the analyses"
    ),
    "bench": Entry(
        "klformer.lab.cli.bench", "measure attentions and operators: `klformer bench --help` names the benchmarks"
    ),
    "data": Entry("klformer.lab.cli.data", "generate data, check it, or say where it is"),
    "recommend": Entry("klformer.lab.cli.recommend", "which attention to use for a length, with the numbers behind it"),
    "doctor": Entry("klformer.lab.cli.doctor", "check every backend on this device, and time it beside softmax"),
    "completion": Entry("klformer.lab.cli.completion", "print a script that completes commands in bash, zsh or fish"),
    "list": Entry("klformer.lab.cli.listing", "attentions with their options, tasks and presets"),
}

USAGE = """\
klformer: Transformers whose attention kernel is learned from data, linear in
the sequence length.

usage: klformer COMMAND [OPTIONS]        klformer COMMAND --help says more

{commands}

Before the command:
  --plugin MODULE   import a module, or a file like path/to/plugin.py, that
                    registers attentions or tasks of your own; may be given
                    several times
  --backend NAME    who computes the products of kernels, yours or one of ours;
                    if not given, chosen for each call
  --version         say the version

A first try:
  klformer train --task sparsity --attention gmm-rks --training.max-steps 300
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; errors that are the user's to act on are one line and exit code 1 or 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # torch's profiler says when it starts and stops, unless its library is told otherwise before it is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
    try:
        try:
            chosen = _read(arguments)
            if chosen is not None:
                command, options, backend = chosen
                with _computing_with(backend):
                    command.run(options)
        finally:
            sys.stdout.flush()  # a reader that has left is noticed here, not at the interpreter's end
        _leave_processes()
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Interrupted as stop:
        _leave_processes()
        _fail(f"{stop}\nGo on with the same command and --resume (compare goes on by itself).", 130)
    except (ArgumentError, ArgumentTypeError) as error:
        _fail(str(error), 2)
    except UserError as error:
        _fail_as_user_error(error)
    except OtherProcessFailedError:
        raise SystemExit(1) from None
    except BrokenPipeError:
        # The reader of the output has left; nothing more can be printed, not even by the interpreter at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except Exception as error:
        _fail_unexpectedly(error, arguments)


def _read(arguments: Sequence[str]) -> "tuple[Command[Any], Any, str | None] | None":
    """Return the command with its options, and the backend; None where everything is said already."""
    plugins, backend, arguments = _split_first(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        from klformer.lab.terminal import help_width

        lines = []
        for name, entry in COMMANDS.items():
            lines += wrap(
                f"  {name:10s} {entry.summary}", help_width(), subsequent_indent=" " * 13, break_on_hyphens=False
            )
        print(USAGE.format(commands="\n".join(lines)), end="")
        raise SystemExit(0 if arguments else 2)
    if arguments == ["--version"]:
        print(f"klformer {klformer.__version__}")
        return None
    name, *rest = arguments
    if name not in COMMANDS:
        raise ArgumentError(unknown("command", name, (*COMMANDS, "--version", "--help")))
    with _ending_at_interrupt():
        command: Command[Any] = import_module(COMMANDS[name].module).COMMAND
        # Imported here: it reads what is installed, which --version does not need.
        from klformer.plugins import load_plugins

        load_plugins(plugins)
        return command, command.parse(rest, f"klformer {name}"), backend


def _split_first(arguments: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the plugins and the backend that are named before the command, and the rest."""
    plugins, backend, rest = [], None, list(arguments)
    while rest and rest[0].partition("=")[0] in ("--plugin", "--backend"):
        flag, equals, name = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                what = "module" if flag == "--plugin" else "name"
                raise ArgumentError(f"{flag} needs a {what}: klformer {flag} {what.upper()} COMMAND")
            name = rest.pop(0)
        if flag == "--plugin":
            plugins.append(name)
        else:
            backend = name
    return plugins, backend, rest


@contextmanager
def _computing_with(backend: str | None) -> Iterator[None]:
    """Make a backend compute all products, also those of processes that the command starts."""
    if backend is None:
        yield
        return
    from klformer.ops.spectral_product import dispatch

    before = os.environ.get(dispatch.VARIABLE)
    with dispatch.use_backend(backend):
        os.environ[dispatch.VARIABLE] = backend
        try:
            yield
        finally:
            if before is None:
                del os.environ[dispatch.VARIABLE]
            else:
                os.environ[dispatch.VARIABLE] = before


@contextmanager
def _ending_at_interrupt() -> Iterator[None]:
    """End the process at Ctrl-C at once, with one line.

    For the time of imports: a KeyboardInterrupt inside of torch's or numpy's initialisation becomes another error, and
    there is nothing yet to be cleaned up.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else has decided, or asked to ignore it
        return

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"klformer: interrupted\n")
        os._exit(130)

    try:
        signal.signal(signal.SIGINT, end)
    except ValueError:  # only the main thread may; in others no interrupt arrives
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_processes() -> None:
    """Leave the processes of torchrun; what was never imported has started none."""
    if "klformer.lab.training.processes" in sys.modules:
        from klformer.lab.training.processes import leave_processes

        leave_processes()


def _fail(message: str, code: int) -> NoReturn:
    from klformer.lab.terminal import harmless

    print(f"klformer: {harmless(message)}", file=sys.stderr)
    raise SystemExit(code)


def _fail_as_user_error(error: UserError) -> NoReturn:
    from traceback import print_exception

    from klformer.plugins import PluginError

    if isinstance(error, PluginError):
        print_exception(error.__cause__)
    _fail(str(error), 1)


def _fail_unexpectedly(error: Exception, arguments: Sequence[str]) -> NoReturn:
    """Say whose mistake an error is: a configuration that is not valid is the user's; everything else is ours."""
    import shlex
    from traceback import print_exception

    from pydantic import ValidationError

    from klformer.config import describe_problems
    from klformer.plugins import plugin_in

    if isinstance(error, ValidationError):
        _fail(describe_problems(error), 2)
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", str(error)):
        said = str(error).strip().splitlines()[:1]
        reason = f" ({said[0].rpartition('] ')[2]})" if said else ""
        _fail(f"out of memory{reason}: a smaller --training.batch-size, --data.max-len or model takes less", 1)
    print_exception(error)
    if (name := plugin_in(error.__traceback__)) is not None:
        _fail(f"the plugin {name} failed: {type(error).__name__}: {error}", 1)
    _fail(
        "this is a bug of klformer. Please report the lines above, "
        f"with the version, {klformer.__version__}, and the command: {shlex.join(['klformer', *arguments])}",
        1,
    )
