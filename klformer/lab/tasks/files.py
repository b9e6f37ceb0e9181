"""Data: found as files or asked of the hub, read, written as a whole or not at all, checked against a manifest."""

import json
import logging
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from klformer.errors import DataError
from klformer.files import check_regular, parse_json, sha256, write_text


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


MANIFEST = "manifest.json"
#: A temporary file that nobody has written to for so long (seconds) was left by a process that was killed.
_ABANDONED = 600


def exists(path: Path) -> bool:
    """Whether a file or folder is there.

    Raises:
        DataError: nobody knows, because a folder may not be entered or the name is too long.
    """
    return _mode(path) is not None


def is_folder(path: Path) -> bool:
    """Whether a folder is there. Raises as `exists`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    # Path.exists and Path.is_dir raise some errors of the system and answer no to others, depending on the version.
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"can't be looked for: {error.strerror or error}", file=path) from error


def entries(folder: Path) -> list[Path]:
    """What is in a folder, sorted; nothing if there is no folder.

    Raises:
        DataError: it can't be read, where `Path.glob` would find nothing.
    """
    if not is_folder(folder):
        return []
    with reading(folder):
        return sorted(folder.iterdir())


def first_existing(paths: Iterable[Path]) -> Path | None:
    """The first of the paths that is there. Raises as `exists`."""
    return next((path for path in paths if exists(path)), None)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the system says of a file that can't be read into a DataError. Pipes and devices are a FileError."""
    try:
        check_regular(path)
        yield
    except FileNotFoundError as error:
        raise DataError("the file is missing", file=path) from error
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror or error}", file=path) from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line numbers, from 1, and lines without their ends, which the last may lack. Raises DataError as `reading`."""
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield number, line.rstrip(b"\r\n")


def parse_label(text: str, num_classes: int, *, file: Path, line: int | None = None) -> int:
    """A label written as 3 or 3.0.

    Raises:
        DataError: it is not a whole number from 0 to num_classes - 1.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value not in range(num_classes):
        raise DataError(
            f"the label must be a whole number from 0 to {num_classes - 1}, got {text!r}", file=file, line=line
        )
    return int(value)


_REFUSAL: ContextVar[str | None] = ContextVar("_REFUSAL", default=None)


@contextmanager
def only_reading(remedy: str) -> Iterator[None]:
    """Inside, data that is not there is an error, which ends with the remedy, and is not generated."""
    token = _REFUSAL.set(remedy)
    try:
        yield
    finally:
        _REFUSAL.reset(token)


class GeneratedFolder:
    """A folder of generated files with a manifest, written last, of their sizes and checksums.

    Without a manifest the generation was interrupted, and is to be done again. A file that does not agree with the
    manifest was changed afterwards, which is an error: nothing says that it may be overwritten.

    Args:
        path: The folder.
        settings: What the files are generated from, as JSON knows it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = dict(settings)

    @property
    def is_complete(self) -> bool:
        return exists(self.path / MANIFEST)

    def describe(self) -> str:
        """Where it is, and whether it is there yet."""
        return f"{self.path} ({'generated' if self.is_complete else 'will be generated'})"

    def open(self, *, quiet: bool) -> None:
        """Make the folder before anything is generated, which may take long; say so if an earlier generation was
        interrupted, and delete what a process that was killed left.

        Raises:
            DataError: it can't be written, or data is only to be read here.
        """
        if (remedy := _REFUSAL.get()) is not None:
            raise DataError(f"the data is not there{remedy}", file=self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            problem = f"can't be written: {error.strerror or error}; data.root must be a folder where that is allowed"
            raise DataError(problem, file=self.path) from error
        if self.is_complete or not entries(self.path):
            return
        say(f"{self.path}: an earlier generation was interrupted, starting again", quiet=quiet)
        for leftover in self.path.glob(".*.tmp"):
            if time.time() - leftover.stat().st_mtime > _ABANDONED:
                leftover.unlink(missing_ok=True)

    def complete(self, rows: Mapping[str, int]) -> None:
        """Write the manifest of the files, given with their numbers of rows."""
        files = {}
        for name, count in rows.items():
            path = self.path / name
            files[name] = {"rows": count, "bytes": path.stat().st_size, "sha256": sha256(path)}
        write_text(self.path / MANIFEST, json.dumps({"settings": self.settings, "files": files}, indent=2) + "\n")

    def verified(self, name: str) -> tuple[Path, int]:
        """The path and the number of rows of a file, which is as it was written.

        Raises:
            DataError: the file is missing, or it or the manifest was changed.
        """
        remedy = f"delete the folder {self.path} and it is generated again"
        manifest_path = self.path / MANIFEST
        try:
            with reading(manifest_path):
                manifest = parse_json(manifest_path.read_bytes())
            settings, entry = manifest["settings"], manifest["files"][name]
            rows, size, digest = int(entry["rows"]), int(entry["bytes"]), str(entry["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"is not a manifest of {name}; {remedy}", file=manifest_path) from error
        if settings != self.settings:
            raise DataError(f"was made with {settings}, not with {self.settings}; {remedy}", file=manifest_path)
        path = self.path / name
        with reading(path):
            found = path.stat().st_size
            if found != size:
                raise DataError(f"has {found} bytes where the manifest says {size}; {remedy}", file=path)
            if sha256(path) != digest:
                raise DataError(f"was changed after it was generated (its checksum differs); {remedy}", file=path)
        return path, rows


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
