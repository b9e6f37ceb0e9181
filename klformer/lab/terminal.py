"""Tables on screen: as wide as the terminal, or wide enough for all columns where there is none."""

import os

from rich.console import Console


def make_console(least: int) -> Console:
    """A console for tables.

    Args:
        least: Columns that the tables like to have, in a file or a pipe. A terminal's own width, and COLUMNS, go first.
    """
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=max(least, console.width))
