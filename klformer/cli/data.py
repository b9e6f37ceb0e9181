"""`klformer data`: generate data, check it, or say where it is."""

from dataclasses import dataclass, field, make_dataclass
from typing import Literal

import numpy as np
import tyro

from klformer.cli.subcommands import peek
from klformer.errors import ArgumentError
from klformer.runs.config import AttentionConfig
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
    """The command once for every task that it is about, as each has defaults and options of its own."""
    peeked = peek(arguments, task=None, preset=DEFAULT_PRESET)
    if peeked.task is not None or arguments[:1] != ["where"]:
        return [_parse_one(peeked.task, arguments)]
    return [_parse_one(task, _for_task(task, arguments)) for task in task_names()]


def _for_task(task: str, arguments: list[str]) -> list[str]:
    """The arguments without options of the data that other tasks have and this one has not."""
    elsewhere = {name for other in TASKS for name in TASKS[other].data_config.model_fields}
    lacking = {_flag(name) for name in elsewhere - set(TASKS[task].data_config.model_fields)}
    kept, skip = [], False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if skip or flag in lacking:
            skip = not skip and not equals
        else:
            kept.append(argument)
    return kept


def _flag(name: str) -> str:
    return f"--data.{name.replace('_', '-')}"


def _parse_one(task: str | None, arguments: list[str]) -> Data:
    """The command, about this task if the arguments name none."""
    peeked = peek(arguments, task=task, preset=DEFAULT_PRESET)
    usual = preset(peeked.preset, peeked.task or DEFAULT_TASK, AttentionConfig(name=DEFAULT_ATTENTION)).data
    data = DataConfig() if peeked.task is None else usual
    command = make_dataclass(
        "Data", [("data", type(data))], bases=(Data,), frozen=True, kw_only=True, namespace={"__doc__": Data.__doc__}
    )
    default = command(action=tyro.MISSING, task=peeked.task, preset=peeked.preset, data=data)
    return tyro.cli(command, args=arguments, default=default, prog="klformer data")


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
            counts = ", ".join(str(n) for n in np.bincount(examples.targets, minlength=task.num_classes))
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
