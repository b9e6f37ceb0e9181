"""What a report is made of: runs, analyses and benchmarks, found in folders and read into plain data.

What is there and can't be read is listed as damaged, with the reason; the rest is read all the same.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from klformer.errors import ArgumentError, UserError
from klformer.files import read_json
from klformer.lab.report.benchmarks import Benchmark, Kind, read_benchmark, rows_of
from klformer.lab.report.run import Run, read_run
from klformer.lab.runs.find import find_runs, walk
from klformer.lab.runs.folder import RunFolder

Thing = TypeVar("Thing")

VARIANCE, EIGENVALUES = "variance.json", "eigenvalues.json"
#: Files of benchmarks, with the commands that write them.
BENCHMARKS = {f"{name}.json": f"klformer bench {name} --out FOLDER" for name in ("attention", "model", "peers")}


@dataclass(frozen=True)
class Analysis:
    """The rows of an analysis, with the caption that it wrote."""

    caption: str
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Damaged:
    """A run or a file that can't be read."""

    path: Path
    problem: str

    def brief(self) -> str:
        """Return the problem without the folders above: where runs lay is private, and a page may be published."""
        return self.problem.replace(f"{self.path.parent}/", "")


@dataclass(frozen=True)
class Collection:
    """Everything that was found.

    Args:
        damaged: What could not be read.
        left_out: Folders in which there was nothing for a report.
    """

    runs: tuple[Run, ...] = ()
    variance: tuple[Analysis, ...] = ()
    eigenvalues: tuple[Analysis, ...] = ()
    benchmarks: tuple[Benchmark, ...] = ()
    damaged: tuple[Damaged, ...] = ()
    left_out: tuple[Path, ...] = ()

    def benchmarks_of(self, kind: Kind) -> list[Benchmark]:
        """Return the benchmarks of one kind."""
        return [benchmark for benchmark in self.benchmarks if benchmark.kind == kind]


@dataclass
class _Found:
    """Paths by kind, each once."""

    runs: dict[Path, Path] = field(default_factory=dict)
    files: dict[Path, Path] = field(default_factory=dict)

    def add_run(self, folder: Path) -> None:
        self.runs.setdefault(folder.resolve(), folder)

    def add_file(self, path: Path) -> None:
        self.files.setdefault(path.resolve(), path)


def collect(folders: Sequence[Path], *, analysis: Path | None = None, bench: Path | None = None) -> Collection:
    """Read runs, and the analyses and benchmarks that lie beside them.

    Args:
        folders: Runs, or folders of runs.
        analysis: A folder with variance.json or eigenvalues.json.
        bench: A file that `klformer bench` wrote, or a folder with attention.json, model.json or peers.json.

    Raises:
        ValueError: a folder is not there, or all hold nothing of the kind.
    """
    found = _Found()
    for folder in folders:
        if not folder.is_dir():
            raise ArgumentError(f"{folder} is not a folder; give runs, or folders of runs")
    left_out = [folder for folder in folders if _look_through(folder, found) == 0]
    if folders and len(left_out) == len(folders):
        others = ", ".join((VARIANCE, EIGENVALUES, *BENCHMARKS))
        raise ArgumentError(f"{left_out[0]} holds no run (no {RunFolder.CONFIG}), and none of {others}")
    if analysis is not None:
        there = [analysis / name for name in (VARIANCE, EIGENVALUES) if (analysis / name).is_file()]
        if not there:
            raise ArgumentError(f"{analysis} holds neither {VARIANCE} nor {EIGENVALUES}")
        for path in there:
            found.add_file(path)
    if bench is not None:
        for path in _benchmark_files(bench):
            found.add_file(path)
    paths = sorted(found.runs.values())
    titles = _titles([path.resolve() for path in paths])
    files = sorted(found.files.values())
    damaged: list[Damaged] = []

    def whole(paths: Iterable[Path], read: Callable[[Path], Thing]) -> Iterator[Thing]:
        for path in paths:
            try:
                yield read(path)
            except UserError as error:
                damaged.append(Damaged(path, str(error)))

    title_of = dict(zip(paths, titles, strict=True))
    runs = tuple(whole(paths, lambda path: read_run(path, title=title_of[path])))
    return Collection(
        runs=runs,
        variance=tuple(whole((path for path in files if path.name == VARIANCE), read_analysis)),
        eigenvalues=tuple(whole((path for path in files if path.name == EIGENVALUES), read_analysis)),
        benchmarks=tuple(whole((path for path in files if path.name not in (VARIANCE, EIGENVALUES)), read_benchmark)),
        damaged=tuple(damaged),
        left_out=tuple(left_out),
    )


def _benchmark_files(bench: Path) -> list[Path]:
    """Return a file as it is, or those of a folder that have a benchmark's name."""
    there = [path for path in ([bench / name for name in BENCHMARKS] if bench.is_dir() else [bench]) if path.is_file()]
    if not there:
        names, commands = ", ".join(BENCHMARKS), ", ".join(f"`{command}`" for command in BENCHMARKS.values())
        where = f"no benchmark in {bench} ({names})" if bench.is_dir() else f"no benchmark {bench}"
        raise ArgumentError(f"there is {where}; {commands} write them")
    return there


def _look_through(top: Path, found: _Found) -> int:
    """Add what lies below a folder; returns how much that is, known already or not."""
    runs = find_runs(top)
    files = [
        folder / name
        for folder, names in walk(top)
        for name in {VARIANCE, EIGENVALUES, *BENCHMARKS}.intersection(names)
    ]
    for run in runs:
        found.add_run(run)
    for path in files:
        found.add_file(path)
    return len(runs) + len(files)


def _titles(folders: Sequence[Path]) -> list[str]:
    """Return the names of different folders, each below as many of its parents as tell it from the others."""
    depths = [1] * len(folders)
    while True:
        titles = [Path(*folder.parts[-depth:]).as_posix() for folder, depth in zip(folders, depths, strict=True)]
        times = Counter(titles)
        longer = [
            depth + (times[title] > 1 and depth < len(folder.parts))
            for folder, depth, title in zip(folders, depths, titles, strict=True)
        ]
        if longer == depths:
            return titles
        depths = longer


def read_analysis(path: Path) -> Analysis:
    """Read what an analysis wrote."""
    content = read_json(path)
    return Analysis(caption=str(content.get("caption", "")), rows=rows_of(content, "rows", ("run", "attention"), path))
