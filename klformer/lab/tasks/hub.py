"""Data sets from the Hugging Face hub, asked only when no folder is named and nothing is found in the usual one."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from klformer.errors import DataError
from klformer.lab.tasks.progress import say


def load_from_hub(name: str, split: str, *, root: Path, looked_for: Sequence[str]) -> Any:
    """A split of a data set of the hub."""
    problem = f"put one of {', '.join(looked_for)} here; none was found, and the hub did not give {name!r}"
    try:
        # Imported here: it takes a second, and local data does not need it.
        from datasets import load_dataset  # type: ignore[import-untyped]

        say(f"asking the hub for {name}", quiet=False)
        with _without_retries():
            return load_dataset(name, split=split)
    except Exception as error:
        # The library raises errors of its own and of several network libraries; to the user all mean the same.
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{problem}: {type(error).__name__}: {reason}", file=root) from error


@contextmanager
def _without_retries() -> Iterator[None]:
    """The client tells of every attempt; to the user there is one, and one error."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def nothing_usable(root: Path, looked_for: Sequence[str]) -> DataError:
    """An error for a folder that the user named and that has nothing of what was looked for."""
    return DataError(f"has none of {', '.join(looked_for)}; --data.root must be the folder with one of them", file=root)
