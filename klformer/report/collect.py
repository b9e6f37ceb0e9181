"""What a report is made of: runs, analyses and benchmarks, read from folders into plain data.

A run that is not finished is read as far as it has come. A file that is there and can't be read is an error with its
name.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from klformer.attention import attention_names
from klformer.errors import ArgumentError, RunError
from klformer.report.benchmarks import AttentionBenchmark, ModelBenchmark, PeerBenchmark, read_benchmark
from klformer.report.reading import finite, read_object, rows_of
from klformer.runs.changes import flatten
from klformer.runs.folder import RunFolder
from klformer.runs.presets import preset_names, usual_options
from klformer.tasks import task_names
from klformer.training.log import read_lines

VARIANCE, EIGENVALUES = "variance.json", "eigenvalues.json"
#: Files of benchmarks, with the commands that write them.
BENCHMARKS = {f"{name}.json": f"klformer bench {name} --out FOLDER" for name in ("attention", "model", "peers")}
CONFIG, RESULT, METRICS = RunFolder.CONFIG, RunFolder.RESULT, RunFolder.METRICS
#: Folders of a run that hold nothing for a report.
PASSED_OVER = {"checkpoints", "tensorboard", "variance-scores"}
#: No run has as many steps; larger numbers can't be drawn.
MAX_STEP = 10**12
#: How deep runs may lie below a folder that is given.
MAX_DEPTH = 4
#: Where the data lay says nothing about a result, and a page may be published.
PRIVATE = {"data.root"}


@dataclass(frozen=True)
class Score:
    """The evaluation of one split; every number that was written, by its name."""

    numbers: Mapping[str, float]

    def get(self, name: str) -> float | None:
        return self.numbers.get(name)


@dataclass(frozen=True)
class Result:
    """What a finished run wrote into result.json."""

    test: Score
    validation: Score
    protocol: str
    #: steps, best_step, parameters, train_seconds, peak_memory_bytes and whatever else is a number.
    numbers: Mapping[str, float]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    name: str
    #: The name, below as many folders as tell it from other runs of the report.
    title: str
    task: str
    #: The attention with the options in which it differs from its preset.
    attention: str
    attention_name: str
    preset: str
    seed: int
    #: The configuration, flattened: "model.num_layers" and so on.
    config: Mapping[str, Any]
    #: (step, validation accuracy) as far as the run has come.
    curve: tuple[tuple[int, float], ...] = ()
    #: The median of the logged speeds, which a pause of the machine does not change; tokens a second.
    speed: float | None = None
    last_step: int = 0
    result: Result | None = None


@dataclass(frozen=True)
class Analysis:
    """The rows of an analysis, with the caption that it wrote."""

    caption: str
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Collection:
    """Everything that was found."""

    runs: tuple[Run, ...] = ()
    variance: tuple[Analysis, ...] = ()
    eigenvalues: tuple[Analysis, ...] = ()
    attention_benchmarks: tuple[AttentionBenchmark, ...] = ()
    model_benchmarks: tuple[ModelBenchmark, ...] = ()
    peer_benchmarks: tuple[PeerBenchmark, ...] = ()


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
        ValueError: a folder is not there or holds nothing of the kind, or a file can't be read.
    """
    found = _Found()
    for folder in folders:
        if not folder.is_dir():
            raise ArgumentError(f"{folder} is not a folder; give runs, or folders of runs")
        if _look_through(folder, found) == 0:
            others = ", ".join((VARIANCE, EIGENVALUES, *BENCHMARKS))
            raise ArgumentError(f"{folder} holds no run (no {CONFIG}), and none of {others}")
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
    benchmarks = [read_benchmark(path) for path in files if path.name not in (VARIANCE, EIGENVALUES)]
    return Collection(
        runs=tuple(read_run(path, title=title) for path, title in zip(paths, titles, strict=True)),
        variance=tuple(read_analysis(path) for path in files if path.name == VARIANCE),
        eigenvalues=tuple(read_analysis(path) for path in files if path.name == EIGENVALUES),
        attention_benchmarks=tuple(one for one in benchmarks if isinstance(one, AttentionBenchmark)),
        model_benchmarks=tuple(one for one in benchmarks if isinstance(one, ModelBenchmark)),
        peer_benchmarks=tuple(one for one in benchmarks if isinstance(one, PeerBenchmark)),
    )


def _benchmark_files(bench: Path) -> list[Path]:
    """A file as it is, or those of a folder that have a benchmark's name."""
    there = [path for path in ([bench / name for name in BENCHMARKS] if bench.is_dir() else [bench]) if path.is_file()]
    if not there:
        names, commands = ", ".join(BENCHMARKS), ", ".join(f"`{command}`" for command in BENCHMARKS.values())
        where = f"no benchmark in {bench} ({names})" if bench.is_dir() else f"no benchmark {bench}"
        raise ArgumentError(f"there is {where}; {commands} write them")
    return there


def _look_through(top: Path, found: _Found) -> int:
    """Add what lies below a folder; returns how much that is, known already or not."""
    count = 0
    for folder, subfolders, files in os.walk(top, followlinks=True):
        here = Path(folder)
        depth = len(here.relative_to(top).parts)
        subfolders[:] = sorted(
            name for name in subfolders if depth < MAX_DEPTH and name not in PASSED_OVER and not name.startswith(".")
        )
        if CONFIG in files:
            found.add_run(here)
            count += 1
        for name in {VARIANCE, EIGENVALUES, *BENCHMARKS}.intersection(files):
            found.add_file(here / name)
            count += 1
    return count


def _titles(folders: Sequence[Path]) -> list[str]:
    """The names of different folders, each below as many of its parents as tell it from the others."""
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


def read_run(folder: Path, *, title: str = "") -> Run:
    """Read the configuration, the record and, if the run is finished, the result.

    Args:
        title: What to call it; its name, if nothing is given.

    Raises:
        ValueError: a file can't be read, or something that a report needs is not in it.
    """
    path = folder / CONFIG
    config = read_object(path)
    task, preset, seed = _need(config, "task", str, path), _need(config, "preset", str, path), config.get("seed", 0)
    attention = _need(config, "attention", dict, path)
    name = _need(attention, "name", str, path)
    options = attention.get("options") or {}
    if not isinstance(seed, int) or not isinstance(options, dict):
        raise ArgumentError(
            f"{path} is not a run's configuration: seed or the attention's options are of the wrong type"
        )
    flat = {key: value for key, value in flatten(config).items() if key not in PRIVATE}
    lines = _read_record(folder / METRICS)
    result = _read_result(folder / RESULT) if (folder / RESULT).exists() else None
    return Run(
        name=folder.resolve().name,
        title=title or folder.resolve().name,
        task=_task_label(task, finite(flat.get("data.sparsity"))),
        attention=_label(task, preset, name, options),
        attention_name=name,
        preset=preset,
        seed=seed,
        config=flat,
        curve=tuple((line["step"], line["accuracy"]) for line in lines if _is_point(line)),
        speed=_median_speed(lines),
        last_step=max((line["step"] for line in lines), default=0),
        result=result,
    )


def read_analysis(path: Path) -> Analysis:
    """Read what an analysis wrote.

    Raises:
        ValueError: the file can't be read or has no rows.
    """
    content = read_object(path)
    return Analysis(caption=str(content.get("caption", "")), rows=rows_of(content, "rows", ("run", "attention"), path))


def _need(content: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    if not isinstance(content.get(key), kind):
        raise ArgumentError(f"{path} is not a run's configuration: {key!r} is missing or not a {kind.__name__}")
    return content[key]


def _read_record(path: Path) -> list[dict[str, Any]]:
    try:
        lines = read_lines(path)
    except (OSError, RunError) as error:
        raise ArgumentError(str(error)) from error
    if any(abs(line["step"]) > MAX_STEP for line in lines):
        raise ArgumentError(f"{path} is damaged: a line has a step above {MAX_STEP:,}")
    return lines


def _is_point(line: Mapping[str, Any]) -> bool:
    return line.get("kind") == "validation" and finite(line.get("accuracy")) is not None


def _median_speed(lines: Sequence[Mapping[str, Any]]) -> float | None:
    speeds = [speed for line in lines if (speed := finite(line.get("tokens_per_second"))) is not None]
    return median(speeds) if speeds else None


def _read_result(path: Path) -> Result:
    content = read_object(path)
    environment = content.get("environment", {})
    if not isinstance(environment, dict):
        raise ArgumentError(f"{path} is damaged: environment is not an object")
    return Result(
        test=_score(content, "test", path),
        validation=_score(content, "validation", path),
        protocol=str(content.get("protocol", "")),
        numbers=dict(_numbers(content)),
        environment={key: str(value) for key, value in environment.items()},
    )


def _score(content: Mapping[str, Any], split: str, path: Path) -> Score:
    score = content.get(split)
    if not isinstance(score, dict):
        raise ArgumentError(f"{path} is damaged: it has no {split!r}")
    return Score(dict(_numbers(score)))


def _numbers(content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        number = finite(value)
        if number is not None:
            yield key, number


def _task_label(task: str, sparsity: float | None) -> str:
    return task if sparsity is None else f"{task} {sparsity:g}"


def _label(task: str, preset: str, name: str, options: Mapping[str, Any]) -> str:
    """As in `klformer train`, also for attentions, tasks and presets that this version does not know."""
    known = name in attention_names() and task in task_names() and preset in preset_names(task)
    usual = usual_options(preset, task, name) if known else {}
    chosen = {key: value for key, value in options.items() if key not in usual or usual[key] != value}
    text = ",".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in sorted(chosen.items()))
    return f"{name}:{text}" if text else name
