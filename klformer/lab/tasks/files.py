"""Data: found as files or asked of the hub, read, written as a whole or not at all, checked against a manifest."""

import json
import logging
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from klformer.errors import DataError
from klformer.files import check_regular, parse_json, sha256, write_text
from klformer.lab.data import Examples
from klformer.lab.tasks.config import DataConfig, Split


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
    """Print a line on standard error."""
    if not quiet:
        Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(message)


MANIFEST = "manifest.json"
#: A temporary file without a write for so long (seconds) was left by a process that was killed.
_ABANDONED = 600


def exists(path: Path) -> bool:
    """Return whether a file or folder is there."""
    return _mode(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether a folder is there. Raises as `exists`."""
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
    """Return what is in a folder, sorted; nothing if there is no folder."""
    if not is_folder(folder):
        return []
    with reading(folder):
        return sorted(folder.iterdir())


def first_existing(paths: Iterable[Path]) -> Path | None:
    """Return the first of the paths that is there. Raises as `exists`."""
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
    """Yield line numbers, from 1, and lines without their ends, which the last may lack. Raises DataError as
    `reading`."""
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield number, line.rstrip(b"\r\n")


def read_tabbed(path: Path, names: Sequence[str]) -> Iterator[tuple[int, list[bytes]]]:
    """Give line numbers, from 1, and the fields of lines between tabs, without any quoting."""
    for number, line in read_lines(path):
        fields = line.split(b"\t")
        if len(fields) != len(names):
            described = f"{len(names)} fields ({', '.join(names)}) between tabs"
            raise DataError(f"a row must have {described}, got {len(fields)}", file=path, line=number)
        yield number, fields


def parse_label(text: str, num_classes: int, *, file: Path, line: int | None = None) -> int:
    """Parse a label written as 3 or 3.0."""
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
    """Raise an error that ends with the remedy, where data that is not there would be generated."""
    token = _REFUSAL.set(remedy)
    try:
        yield
    finally:
        _REFUSAL.reset(token)


class GeneratedFolder:
    """A folder of generated files with a manifest, written last, of their sizes and checksums.

    Without a manifest the generation was interrupted, and is to be done again. A file that does not agree with the
    manifest was changed afterwards, which is an error: nothing says that it may be overwritten.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = dict(settings)

    @property
    def is_complete(self) -> bool:
        return exists(self.path / MANIFEST)

    def describe(self) -> str:
        """Say where it is, and whether it is there yet."""
        return f"{self.path} ({'generated' if self.is_complete else 'will be generated'})"

    def open(self, *, quiet: bool) -> None:
        """Make the folder before anything is generated, which may take long; say so if an earlier generation was
        interrupted, and delete what a process that was killed left."""
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
        """Return the path and the number of rows of a file, which is as it was written."""
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


@dataclass(frozen=True)
class Source:
    """A place that the parts of a task's data are read from.

    Args:
        where: The place, in words.
        read: Gives a part.
        has_validation: There is a validation set of its own.
        is_official: The files are the data set's own.
    """

    where: str
    read: Callable[[Split], Examples]
    has_validation: bool = False
    is_official: bool = True


def hub_or_nothing(config: DataConfig, name: str, looked_for: Sequence[str], read: Callable[[Any], Examples]) -> Source:
    """Return the hub; for a folder that the user has named an error, as no other data takes its place."""
    root = config.folder()

    def nothing(part: Split) -> Examples:
        raise nothing_usable(root, looked_for)

    def from_hub(part: Split) -> Examples:
        return read(load_from_hub(name, part, root=root, looked_for=looked_for))

    if config.root is not None:
        return Source(f"{root} (nothing found: {', '.join(looked_for)})", nothing)
    return Source(f"the hub, {name} (nothing found in {root})", from_hub)


def load_from_hub(name: str, split: str, *, root: Path, looked_for: Sequence[str]) -> Any:
    """Load a split of a data set of the hub."""
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
    """Silence the client, which tells of every attempt; to the user there is one, and one error."""
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
    """Make an error for a folder that the user named and that has nothing of what was looked for."""
    return DataError(f"has none of {', '.join(looked_for)}; --data.root must be the folder with one of them", file=root)
