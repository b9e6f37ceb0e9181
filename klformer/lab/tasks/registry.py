"""Tasks by name. A task registers itself; nothing else names it."""

import inspect
from typing import TypeVar

from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.lab.tasks.base import Task
from klformer.lab.tasks.config import DataConfig
from klformer.lab.tasks.presets import SECTIONS
from klformer.registry import Registry

TASKS: Registry[type[Task]] = Registry("task")
"""Classes of tasks by name; `register_task` adds one."""

SomeTask = TypeVar("SomeTask", bound=type[Task])


def register_task(task: SomeTask) -> SomeTask:
    """Make a task known by its name; also as a decorator of the class.

    Args:
        task: A subclass of `Task`; its docstring has an example of a whole one.

    Returns:
        The task.

    Raises:
        ArgumentTypeError: it is no subclass of Task.
        ArgumentError: something is missing or wrong in it, or the name is taken.

    Examples:
        >>> import klformer
        >>> class Nameless(klformer.Task):
        ...     pass
        >>> klformer.register_task(Nameless)
        Traceback (most recent call last):
        ...
        klformer.errors.ArgumentError: the task Nameless is not complete: name must be a word; ...
    """
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ArgumentTypeError(f"a task must be a subclass of klformer.lab.tasks.Task, got {task!r}")
    problems = _problems(task)
    if problems:
        raise ArgumentError(f"the task {task.__name__} is not complete: {'; '.join(problems)}")
    TASKS.add(task.name, task)
    return task


def task_names() -> list[str]:
    """Return the names of all tasks.

    Examples:
        >>> from klformer.lab.tasks import task_names
        >>> task_names()[:4]
        ['listops', 'text', 'retrieval', 'image']
        >>> "csv" in task_names()
        True
    """
    return list(TASKS)


def build_task(name: str, config: DataConfig, *, quiet: bool = False) -> Task:
    """Build the task of that name.

    Args:
        name: What it is registered as; `task_names` has all.
        config: Where the data is and how it is split; of the class that the task's `data_config` names.
        quiet: Say nothing while generating.

    Raises:
        ArgumentError: there is no such task, or the configuration has a value that is not allowed.
        ArgumentTypeError: the configuration is another task's.

    Examples:
        >>> from klformer.lab.tasks import TASKS, build_task
        >>> task = build_task("recall", TASKS["recall"].data_config(num_examples=100))
        >>> len(task.load("train")), task.max_len
        (100, 20)
    """
    return TASKS[name](config, quiet=quiet)


def _problems(task: type[Task]) -> list[str]:
    """Return what is missing or wrong."""
    name = getattr(task, "name", None)
    classes, longest = getattr(task, "num_classes", None), getattr(task, "default_max_len", None)
    own_objective, own_shape = task.objective is not Task.objective, task.shape is not Task.shape
    unknown = {section for preset in task.presets.values() for section in preset} - set(SECTIONS)
    checks = {
        "name must be a word": isinstance(name, str) and name != "" and not set(name) & set(" /:,"),
        "num_classes must be at least 2, or objective() be its own": own_objective
        or (isinstance(classes, int) and classes >= 2),
        "one of vocab_size and input_dim must be given, or shape() be its own": own_shape
        or (task.vocab_size is None) != (task.input_dim is None),
        "default_max_len must be at least 1": isinstance(longest, int) and longest >= 1,
        "read(part) must give the examples of a part": not inspect.isabstract(task),
        "data_config must be a subclass of DataConfig": issubclass(task.data_config, DataConfig),
        f"presets have the sections {', '.join(SECTIONS)}, not {', '.join(sorted(unknown))}": not unknown,
    }
    return [problem for problem, is_right in checks.items() if not is_right]
