"""Errors that are somebody's to act on, as opposed to bugs.

The command line prints a `UserError` as one line and exits; everything else is a bug of klformer, and keeps its
traceback. Library users may catch `ArgumentError` as the ValueError that it also is.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


class UserError(Exception):
    """Something that the user can put right. The message says what is wrong, where, and what would be right.

    Examples:
        >>> import klformer
        >>> from klformer.errors import UserError
        >>> try:
        ...     klformer.build_attention("gmm-rsk", num_heads=2, head_dim=8)
        ... except UserError as error:
        ...     print(str(error).partition(";")[0])
        unknown attention 'gmm-rsk'
    """


class ArgumentError(UserError, ValueError):
    """A value that is not allowed: the message names the argument, the value and what would be right.

    Examples:
        >>> import klformer
        >>> from klformer.errors import ArgumentError
        >>> try:
        ...     klformer.build_attention("gmm-rks", num_heads=0, head_dim=8)
        ... except ArgumentError as error:
        ...     print(isinstance(error, ValueError), error)
        True num_heads must be at least 1, got 0
    """


class ArgumentTypeError(UserError, TypeError):
    """A value of the wrong type, or an argument that does not exist.

    Examples:
        >>> import klformer
        >>> from klformer.errors import ArgumentTypeError
        >>> try:
        ...     klformer.build_attention("gmm-rks", num_heads=2, head_dim=8, num_frequency=64)
        ... except ArgumentTypeError as error:
        ...     print(str(error).partition("?")[0])
        gmm-rks has no option 'num_frequency'; did you mean 'num_frequencies'
    """


class FileError(UserError):
    """A file that can't be read, or not be written; what was there before is whole then.

    Examples:
        >>> import klformer
        >>> from klformer.errors import FileError
        >>> try:
        ...     klformer.KernelState.load("missing.safetensors")
        ... except FileError as error:
        ...     print(error)
        can't read missing.safetensors: No such file or directory: missing.safetensors
    """


class DataError(UserError):
    """Data that is missing, malformed or incomplete. The message says where, what is wrong and what would be right.

    Args:
        problem: What is wrong.
        file: The file that it is wrong in.
        line: The line of a text, from 1.
        row: The row of a table that has no lines.

    Examples:
        >>> from pathlib import Path
        >>> from klformer.errors import DataError
        >>> print(DataError("the text is empty", file=Path("reviews.csv"), line=7))
        reviews.csv, line 7: the text is empty
    """

    def __init__(
        self, problem: str, *, file: Path | None = None, line: int | None = None, row: int | None = None
    ) -> None:
        place = f", line {line}" if line is not None else f", row {row}" if row is not None else ""
        super().__init__(problem if file is None else f"{file}{place}: {problem}")


class RunError(UserError):
    """A run that can't be read, gone on with or trained any further; the message says what is safe and what to do.

    Examples:
        >>> from pathlib import Path
        >>> from klformer.errors import RunError
        >>> from klformer.lab.runs.load import load_run
        >>> from klformer.lab.training.progress import SilentReporter
        >>> try:
        ...     load_run(Path("runs/missing"), SilentReporter())
        ... except RunError as error:
        ...     print(error)
        there is no folder runs/missing
    """


class MissingExtraError(UserError, ModuleNotFoundError):
    """A package that is not installed because it belongs to an extra; the message has the command that installs it.

    Examples:
        >>> from klformer.errors import MissingExtraError, check_extra
        >>> try:
        ...     check_extra("bench", "this comparison", ["nobodys_package"])
        ... except MissingExtraError as error:
        ...     print(error)
        this comparison needs nobodys_package: pip install 'klformer[bench]'
    """


def check_extra(extra: str, what: str, modules: Sequence[str]) -> None:
    """Raise MissingExtraError unless all modules of an extra are installed.

    Args:
        extra: The name that pip knows it by.
        what: What needs them, to begin the message with.
        modules: The modules that are needed, which are not imported by this.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"{what} needs {', '.join(missing)}: pip install 'klformer[{extra}]'")


class OtherProcessFailedError(Exception):
    """The main process has found an error and says what it is."""


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked for it
    """Training was asked to stop and has saved its state."""
