"""`klformer data`: generate data, check it, or say where it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import tyro

from klformer.errors import ArgumentError
from klformer.lab.cli.command import Command, peek, read_options
from klformer.lab.cli.help import help_topic
from klformer.lab.data.sequences import IGNORED
from klformer.lab.runs.config import DEFAULT_PRESET, preset_names, preset_sections
from klformer.lab.tasks import DataConfig, Task, build_task, task_names


@dataclass(frozen=True)
class Data:
    """Generate data, check it, or say where it is.

    The data is that of `train` with the same task, preset and `--data.*`. Examples:

      klformer data where
      klformer data generate --task listops
      klformer data check --task text --preset paper --data.root ~/data
    """

    action: tyro.conf.Positional[Literal["where", "generate", "check"]]
    """where: say what each task reads. generate: make what can be made. check: read everything, count what is used."""
    task: str | None = None
    """One task only; for `check` and `generate` it must be given."""
    preset: str = "laptop"
    """Preset whose settings for the task are the defaults of `--data.*`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the data is and how it is split."""


def parse(arguments: Sequence[str], prog: str) -> list[Data]:
    """Read the command once for every task that it is about, as each has options and defaults of its own."""
    peeked = peek(arguments, task=None, preset=DEFAULT_PRESET)
    if peeked.task is not None:
        return [read_options(Data, arguments, prog, default=_default(peeked.task, peeked.preset))]
    having = [task for task in task_names() if peeked.preset in preset_names(task)]
    defaults = [_default(task, peeked.preset) for task in having or task_names()]
    general = Data(action=tyro.MISSING, preset=peeked.preset)
    if help_topic(arguments) is not None:
        return [read_options(Data, arguments, prog, default=general)]
    action = tyro.cli(Data, args=arguments, default=general, prog=prog, return_unknown_args=True)[0].action
    if action != "where":
        raise ArgumentError(f"data {action} needs --task; tasks: {', '.join(task_names())}")
    commands, unread = [], []
    for default in defaults:
        command, rest = tyro.cli(Data, args=arguments, default=default, prog=prog, return_unknown_args=True)
        commands.append(command)
        unread.append(set(_without_values(rest)))
    if strange := set.intersection(*unread):
        raise ArgumentError(f"no task has the option {', '.join(sorted(strange))}; {prog} --help shows the options")
    return commands


def _default(task: str, preset_name: str) -> Data:
    data = preset_sections(preset_name, task, {})["data"]
    assert isinstance(data, DataConfig)
    return Data(action=tyro.MISSING, task=task, preset=preset_name, data=data)


def _without_values(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the flags, and what is no flag's value."""
    for before, part in pairwise(["", *arguments]):
        if part.startswith("--"):
            yield part.partition("=")[0]
        elif not before.startswith("--") or "=" in before:
            yield part


def look_at_data(options: list[Data]) -> None:
    """Do what `parse` read."""
    tasks = [build_task(str(command.task), command.data) for command in options]
    if options[0].action == "where":
        for task in tasks:
            print(f"{task.name:10s} {task.location()}")
            _print_notes(task)
        return
    (task,) = tasks
    if options[0].action == "generate" and not task.is_generated:
        raise ArgumentError(f"{task.name} can't be generated, it is read from {task.location()}")
    task.prepare()
    print(f"{task.name}: {task.location()}")
    if options[0].action == "check":
        _print_counts(task)
    _print_notes(task)


def _print_counts(task: Task) -> None:
    for split in ("train", "validation", "test"):
        examples = task.load(split)
        lengths = examples.lengths
        print(
            f"{split:10s} {len(examples):,} examples, {lengths.min():,} to {lengths.max():,} tokens, "
            f"{lengths.mean():,.0f} on average, {_describe_targets(examples.targets)}"
        )
    print(task.describe_protocol())


def _describe_targets(targets: np.ndarray[Any, Any]) -> str:
    if targets.dtype.kind == "f":
        return f"targets from {targets.min():g} to {targets.max():g}"
    asked = targets[targets != IGNORED]
    if targets.ndim == 2:
        return f"{len(asked) / len(targets):.1f} targets each, of {len(np.unique(asked))} classes"
    return "by class: " + ", ".join(str(count) for count in np.bincount(targets))


def _print_notes(task: Task) -> None:
    for sentence in task.notes():
        print(f"note: {sentence}")


COMMAND = Command(parse, look_at_data)
