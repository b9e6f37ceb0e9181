"""Progress on screen: a bar on a terminal, two plain lines elsewhere, nothing if quiet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(description: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of steps done since the last call. Writes to standard error."""
    console = Console(stderr=True)
    if quiet:
        yield lambda steps: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(description, total=total)
            yield lambda steps: bar.advance(task, steps)
    else:
        say(f"{description}: {total} to do", quiet=False)
        yield lambda steps: None
        say(f"{description}: done", quiet=False)


def say(message: str, *, quiet: bool) -> None:
    """A line on standard error."""
    if not quiet:
        Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(message)
