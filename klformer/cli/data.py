"""`klformer data`: generate data, check it, or say where it is."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import tyro

from klformer.cli.subcommands import peek
from klformer.errors import ArgumentError
from klformer.models import AttentionSpec
from klformer.runs.presets import DEFAULT_ATTENTION, DEFAULT_PRESET, DEFAULT_TASK, preset
from klformer.tasks import TASKS, DataConfig, Task, build_task, task_names


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
    preset: Literal["paper", "laptop"] = "laptop"
    """Preset whose settings for the task are the defaults of `--data.*`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the data is and how it is split."""


def parse(arguments: list[str]) -> list[Data]:
    """The command once for every task that it is about, as each has defaults of its own."""
    command = _parse_one(None, arguments)
    if command.task is not None or command.action != "where":
        return [command]
    commands = []
    for task in task_names():
        command = _parse_one(task, arguments)
        if not TASKS[task].is_generated:
            command = replace(command, data=command.data.model_copy(update={"num_examples": None}))
        commands.append(command)
    return commands


def _parse_one(task: str | None, arguments: list[str]) -> Data:
    """The command, about this task if the arguments name none."""
    peeked = peek(arguments, task=task, preset=DEFAULT_PRESET)
    usual = preset(peeked.preset, peeked.task or DEFAULT_TASK, AttentionSpec(name=DEFAULT_ATTENTION)).data
    data = DataConfig() if peeked.task is None else usual
    default = Data(action=tyro.MISSING, task=peeked.task, preset=peeked.preset, data=data)
    return tyro.cli(Data, args=arguments, default=default, prog="klformer data")


def run(commands: list[Data]) -> None:
    """Do what `parse` read.

    Raises:
        ValueError: a task must be named, or can't be generated.
        DataError: something is wrong with the data.
    """
    command = commands[0]
    if command.action == "where":
        tasks = [build_task(str(command.task), command.data) for command in commands]
        for task in tasks:
            print(f"{task.name:10s} {task.location()}")
            _print_notes(task)
        return
    if command.task is None:
        raise ArgumentError(f"data {command.action} needs --task; tasks: {', '.join(task_names())}")
    task = build_task(command.task, command.data)
    if command.action == "generate" and not task.is_generated:
        raise ArgumentError(f"{task.name} can't be generated, it is read from {task.location()}")
    task.prepare()
    print(f"{task.name}: {task.location()}")
    if command.action == "check":
        for split in ("train", "validation", "test"):
            examples = task.load(split)
            counts = ", ".join(str(n) for n in np.bincount(examples.labels, minlength=task.num_classes))
            lengths = examples.lengths
            print(
                f"{split:10s} {len(examples):,} examples, {lengths.min():,} to {lengths.max():,} tokens, "
                f"{lengths.mean():,.0f} on average, by class: {counts}"
            )
        print(task.describe_protocol())
    _print_notes(task)


def _print_notes(task: Task) -> None:
    for sentence in task.notes():
        print(f"note: {sentence}")
