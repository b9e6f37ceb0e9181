"""Tasks: sequences with targets in three splits, what is learned from them, and how. A task is one file, and a line
here; somebody else's is registered from anywhere."""

from klformer.lab.tasks.base import Task
from klformer.lab.tasks.config import DataConfig, GeneratedData, Split
from klformer.lab.tasks.corpus import Corpus
from klformer.lab.tasks.csv import Csv
from klformer.lab.tasks.folder import Folder
from klformer.lab.tasks.glue import register_glue
from klformer.lab.tasks.image import Image
from klformer.lab.tasks.listops import ListOps
from klformer.lab.tasks.planted import Planted
from klformer.lab.tasks.recall import Recall
from klformer.lab.tasks.registry import TASKS, build_task, register_task, task_names
from klformer.lab.tasks.retrieval import Retrieval
from klformer.lab.tasks.sparsity import Sparsity
from klformer.lab.tasks.text import Text

for _task in (ListOps, Text, Retrieval, Image, Sparsity, Recall, Planted, Csv, Folder, Corpus):
    register_task(_task)
register_glue()

__all__ = [
    "TASKS",
    "Corpus",
    "Csv",
    "DataConfig",
    "Folder",
    "GeneratedData",
    "Image",
    "ListOps",
    "Planted",
    "Recall",
    "Retrieval",
    "Sparsity",
    "Split",
    "Task",
    "Text",
    "build_task",
    "register_task",
    "task_names",
]
