"""Tasks: labelled sequences in three splits, and batches of them. A task is one file, and a line here."""

from klformer.tasks.base import TASKS, Task, build_task, task_names
from klformer.tasks.config import DataConfig, Split
from klformer.tasks.image import Image
from klformer.tasks.listops import ListOps
from klformer.tasks.retrieval import Retrieval
from klformer.tasks.sparsity import Sparsity
from klformer.tasks.text import Text

for _task in (ListOps, Text, Retrieval, Image, Sparsity):
    TASKS.add(_task.name, _task)

__all__ = [
    "TASKS",
    "DataConfig",
    "Image",
    "ListOps",
    "Retrieval",
    "Sparsity",
    "Split",
    "Task",
    "Text",
    "build_task",
    "task_names",
]
