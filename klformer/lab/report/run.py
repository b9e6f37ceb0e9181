"""A run as a report reads it from its folder: configuration, task with its metric, record and result, as plain data.

A run that is not finished is read as far as it has come. The names of a run's files stand here and nowhere else in
the report.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from klformer.attention import attention_names, attention_options
from klformer.errors import RunError
from klformer.lab.runs.changes import flatten
from klformer.lab.runs.config import preset_names, usual_options
from klformer.lab.runs.folder import RunFolder, TaskFacts
from klformer.lab.tables import finite
from klformer.lab.tasks import task_names
from klformer.lab.training.metrics import Metric

#: No run has as many steps; larger numbers can't be drawn.
MAX_STEP = 10**12
#: Where the data lay says nothing about a result, and a page may be published.
PRIVATE = {"data.root", "data.train", "data.validation", "data.test", "data.tokens.file", "init_from"}


#: What is said of a run that started from another one's weights.
PRETRAINED = "pretrained"
ACCURACY = Metric("accuracy", higher_is_better=True, percent=True)
#: What every validation has, whatever the task.
LOSS = Metric("loss", higher_is_better=False, percent=False)


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
    #: How often a class (row) was taken for another (column) on the test set; empty if it was not written.
    confusion: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    name: str
    #: The name, below as many folders as tell it from other runs of the report.
    title: str
    task: TaskFacts
    #: The attention with the options in which it differs from its preset.
    attention: str
    preset: str
    seed: int
    #: The configuration, flattened: "model.num_layers" and so on.
    config: Mapping[str, Any]
    #: (step, the task's metric on the validation set, scaled) as far as the run has come.
    curve: tuple[tuple[int, float], ...] = ()
    #: The median of the logged speeds, which a pause of the machine does not change; tokens a second.
    speed: float | None = None
    last_step: int = 0
    result: Result | None = None


def read_run(folder: Path, *, title: str = "") -> Run:
    """Read the configuration, the task, the record and, if the run is finished, the result."""
    files = RunFolder(folder)
    path, config = folder / files.CONFIG, files.config_json()
    task, preset, seed = _need(config, "task", str, path), _need(config, "preset", str, path), config.get("seed", 0)
    attention = _need(config, "attention", dict, path)
    name = _need(attention, "name", str, path)
    options = attention.get("options") or {}
    if not isinstance(seed, int) or not isinstance(options, dict):
        raise RunError(f"{path} is not a run's configuration: seed or the attention's options are of the wrong type")
    lines = _read_record(files)
    validations = [line for line in lines if line.get("kind") == "validation"]
    pretrained = bool(config.get("init_from") or config.get("encoder"))
    result = None if (content := files.result()) is None else _read_result(content, folder / files.RESULT)
    info = files.task_facts() if (folder / files.TASK).exists() else _guess_task(task, validations, result)
    return Run(
        name=folder.resolve().name,
        title=title or folder.resolve().name,
        task=info,
        attention=_label(task, preset, name, options, pretrained=pretrained),
        preset=preset,
        seed=seed,
        config={
            key: value
            for key, value in flatten(config).items()
            if key not in PRIVATE and not key.startswith("encoder.")
        },
        curve=tuple(_curve(validations, info.metric)),
        speed=_median_speed(lines),
        last_step=max((line["step"] for line in lines), default=0),
        result=result,
    )


def _need(content: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    if not isinstance(content.get(key), kind):
        raise RunError(f"{path} is not a run's configuration: {key!r} is missing or not a {kind.__name__}")
    return content[key]


def _guess_task(name: str, validations: Sequence[Mapping[str, Any]], result: Result | None) -> TaskFacts:
    """Return what is known of the task of a run that does not describe it: its name, and what it was evaluated by."""
    evaluated = [*validations, *([result.test.numbers] if result is not None else [])]
    has_accuracy = not evaluated or any(ACCURACY.name in one for one in evaluated)
    return TaskFacts(name=name, title=name, label=name, chance=None, metric=ACCURACY if has_accuracy else LOSS)


def _read_record(files: RunFolder) -> list[dict[str, Any]]:
    lines = files.metrics()
    if any(abs(line["step"]) > MAX_STEP for line in lines):
        raise RunError(f"{files.path / files.METRICS} is damaged: a line has a step above {MAX_STEP:,}")
    return lines


def _curve(validations: Sequence[Mapping[str, Any]], metric: Metric) -> Iterator[tuple[int, float]]:
    for line in validations:
        value = finite(line.get(metric.name))
        if value is not None:
            yield line["step"], metric.scaled(value)


def _median_speed(lines: Sequence[Mapping[str, Any]]) -> float | None:
    speeds = [speed for line in lines if (speed := finite(line.get("tokens_per_second"))) is not None]
    return median(speeds) if speeds else None


def _read_result(content: Mapping[str, Any], path: Path) -> Result:
    environment = content.get("environment", {})
    if not isinstance(environment, dict):
        raise RunError(f"{path} is damaged: environment is not an object")
    return Result(
        test=Score({**_score(content, "test", path).numbers, **_mismatched(content)}),
        validation=_score(content, "validation", path),
        protocol=str(content.get("protocol", "")),
        numbers=dict(_numbers(content)),
        environment={key: str(value) for key, value in environment.items()},
        confusion=_confusion(content["test"]),
    )


def _score(content: Mapping[str, Any], split: str, path: Path) -> Score:
    score = content.get(split)
    if not isinstance(score, dict):
        raise RunError(f"{path} is damaged: it has no {split!r}")
    return Score(dict(_numbers(score)))


def _confusion(score: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return a square of counts; empty if there is none, or something else."""
    rows = score.get("confusion")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        return ()
    counts = [count for row in rows for count in row]
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
        return ()
    return tuple(tuple(row) for row in rows)


def _mismatched(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the second test set that MNLI has, beside the first."""
    score = content.get("mismatched")
    return {f"mismatched_{key}": value for key, value in _numbers(score)} if isinstance(score, dict) else {}


def _numbers(content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        number = finite(value)
        if number is not None:
            yield key, number


def _label(task: str, preset: str, name: str, options: Mapping[str, Any], *, pretrained: bool) -> str:
    """Return the label as in `klformer train`, also for attentions, tasks and presets that this version does not know;
    that it started from another run is said as if it was an option."""
    usual: Mapping[str, Any] = {}
    if name in attention_names():
        known = task in task_names() and preset in preset_names(task)
        usual = usual_options(preset, task, name) if known else attention_options(name)
    chosen = {key: value for key, value in options.items() if key not in usual or usual[key] != value}
    said = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in sorted(chosen.items())]
    text = ",".join([*said, *([PRETRAINED] if pretrained else [])])
    return f"{name}:{text}" if text else name
