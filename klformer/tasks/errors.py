"""The one error that a problem with data gives."""

from pathlib import Path


class DataError(Exception):
    """Data that is missing, malformed or incomplete. The message says where, what is wrong and what would be right."""

    def __init__(self, problem: str, *, file: Path | None = None, line: int | None = None) -> None:
        where = "" if file is None else f"{file}, line {line}: " if line is not None else f"{file}: "
        super().__init__(where + problem)
