"""What is shown on a terminal: tables as wide as it is, and nothing that would command it."""

import os
import re
from shutil import get_terminal_size
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Control characters but for line ends and tabs: what other people wrote must not move a cursor or set a title.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def harmless(text: str) -> str:
    """Write out the control characters of a text, as \\x1b, but for line ends and tabs."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def help_width() -> int:
    """Return how wide help is: 80 columns, or less on a narrow terminal."""
    return max(40, min(80, get_terminal_size((80, 24)).columns))


def make_console(least: int) -> "Console":
    """Make a console for tables.

    Args:
        least: Columns that the tables like to have, in a file or a pipe. A terminal's own width, and COLUMNS, go first.
    """
    # Imported here: an error that needs `harmless` alone is said at once.
    from rich.console import Console

    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=max(least, console.width))
