"""Files that are written whole or not at all, and their checksums."""

import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from klformer.errors import FileError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says of a file that can't be written into a FileError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors gives the system's words, not its number.
        is_full = os.strerror(errno.ENOSPC) in str(error)
        reason = "the disk is full" if is_full else getattr(error, "strerror", None) or str(error)
        raise FileError(f"can't write {path}: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to; what is there afterwards is synced to disk and takes the place of `path`.

    Raises:
        FileError: it can't be written; `path` is as before then.
    """
    if "\0" in str(path):
        raise FileError(f"no file can be named {str(path)!r}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.touch()
            mode = temporary.stat().st_mode  # as for any new file; safetensors makes its files for the owner alone
            yield temporary
            temporary.chmod(mode)
            sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text in one stroke. Raises as `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a value as JSON in one stroke: paths as text, and what is not finite as null. Raises as `replacing`."""
    write_text(path, json.dumps(_plain(content), indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """What JSON can say of a value."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def check_regular(path: Path) -> Path:
    """Return a path that is no pipe and no device: reading those may never end.

    Raises:
        FileError: it is one; what is not there is for the reader to say.
    """
    if "\0" in str(path):
        raise FileError(f"no file can be named {str(path)!r}")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileError(
            f"{path} must be a regular file, not a {_KINDS.get(stat.S_IFMT(path.stat().st_mode), 'device')}"
        )
    return path


_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError also if it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested too deeply ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        FileError: the file can't be read, or holds something else.
    """
    try:
        text = check_regular(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"can't read {path}: {error}") from error
    try:
        content = parse_json(text)
    except ValueError as error:
        raise FileError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise FileError(f"{path} must hold an object, not a {type(content).__name__}")
    return content


def sync(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The checksum of a file's content, in hexadecimal digits. Raises as `check_regular`."""
    with check_regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
