"""Files of a run: written whole or not at all, and an error that names the file and the reason if they can't be."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from klformer.training.errors import TrainingError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says of a file that can't be written into a TrainingError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors gives the system's words, not its number.
        is_full = os.strerror(errno.ENOSPC) in str(error)
        reason = "the disk is full" if is_full else getattr(error, "strerror", None) or str(error)
        raise TrainingError(f"can't write {path}: {reason}") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then put it in the place of `path`.

    Raises:
        TrainingError: it can't be written; `path` is as before then.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            write(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
