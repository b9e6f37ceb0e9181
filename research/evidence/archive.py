"""Keeps what runs have told, without their weights, so that tables and reports can be made of them again.

    python -m research.evidence.archive runs research/runs/text.tar.xz

A run takes 1 to 4 KB of the archive. `tar xf` unpacks it; what `klformer report`, `klformer curves` and
`klformer analyze evidence` read is all there. Where the data lay is left out. The same runs give the same archive, byte
for byte.
"""

import argparse
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

from klformer.errors import ArgumentError
from klformer.files import replacing
from klformer.lab.runs.find import find_runs
from klformer.lab.runs.folder import RunFolder


def pack(folder: Path, archive: Path) -> int:
    """Write the finished runs below a folder to an archive, and say how many they are.

    Raises:
        ArgumentError: there are none, or two of one name.
        FileError: a file can't be read, or the archive not written.
    """
    runs = [run for run in map(RunFolder, find_runs(folder)) if run.result() is not None]
    if not runs:
        raise ArgumentError(f"no finished run in {folder}")
    names = [run.name for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"several runs below {folder} have the names {', '.join(twice)}; give them archives each")
    with replacing(archive) as temporary, tarfile.open(temporary, "w:xz", preset=9) as file:
        for run in sorted(runs, key=lambda run: run.name):
            for name, content in _files(run):
                entry = tarfile.TarInfo(f"{run.name}/{name}")
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    return len(runs)


def _files(run: RunFolder) -> Iterator[tuple[str, bytes]]:
    """What a run has told, by the names of its files."""
    for name in RunFolder.RECORD:
        path = run.path / name
        if name == RunFolder.CONFIG:
            config = run.config_json()
            config["data"]["root"] = None
            yield name, (json.dumps(config, indent=2) + "\n").encode()
        elif path.exists():
            yield name, path.read_bytes()


def main() -> None:
    """Pack a folder of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the folder that the runs are in")
    parser.add_argument("archive", type=Path, help="the archive to write, .tar.xz")
    options = parser.parse_args()
    print(f"{pack(options.runs, options.archive)} runs, {options.archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
