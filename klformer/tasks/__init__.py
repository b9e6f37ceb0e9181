"""Tasks: sequences with targets in three splits, what is learned from them, and how. A task is one file, and a line
here; somebody else's is registered from anywhere."""

from klformer.tasks.base import Task
from klformer.tasks.config import DataConfig, GeneratedData, Split
from klformer.tasks.corpus import Corpus
from klformer.tasks.csv import Csv
from klformer.tasks.folder import Folder
from klformer.tasks.glue import register_glue
from klformer.tasks.image import Image
from klformer.tasks.listops import ListOps
from klformer.tasks.planted import Planted
from klformer.tasks.recall import Recall
from klformer.tasks.registry import TASKS, build_task, register_task, task_names
from klformer.tasks.retrieval import Retrieval
from klformer.tasks.sparsity import Sparsity
from klformer.tasks.text import Text

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
