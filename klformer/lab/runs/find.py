"""Runs below a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from klformer.errors import FileError
from klformer.files import read_json
from klformer.lab.runs.folder import RunFolder

#: Folders of a run that hold no other runs, and nothing for a report.
PASSED_OVER = RunFolder.SUBFOLDERS | {"variance-scores"}
#: How deep runs may lie below a folder that is given.
MAX_DEPTH = 4


def walk(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and those below it that may hold something for a report, with the names of their files."""
    for folder, subfolders, files in os.walk(top, followlinks=True):
        here = Path(folder)
        depth = len(here.relative_to(top).parts)
        subfolders[:] = sorted(
            name for name in subfolders if depth < MAX_DEPTH and name not in PASSED_OVER and not name.startswith(".")
        )
        yield here, files


def find_runs(top: Path) -> list[Path]:
    """Return the folder itself if it is a run's, and the runs below it. Other things have a config.json too, such as
    models of transformers: they are passed over."""
    return [folder for folder, files in walk(top) if RunFolder.CONFIG in files and not _is_of_others(folder)]


def _is_of_others(folder: Path) -> bool:
    try:
        return "task" not in read_json(folder / RunFolder.CONFIG) and not (folder / RunFolder.TASK).exists()
    except FileError:  # perhaps a damaged run, which is to be named
        return False
