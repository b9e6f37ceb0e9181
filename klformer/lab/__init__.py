"""The laboratory: tasks, training, runs, benchmarks, analyses, reports and the command `klformer`.

It imports the library; the library never imports it.
"""

from klformer.errors import check_extra

#: What the extra `lab` brings, by the names that Python imports.
MODULES: tuple[str, ...] = ("accelerate", "datasets", "jinja2", "matplotlib", "numpy", "PIL")
MODULES += ("pyarrow", "rich", "tensorboard", "tokenizers", "torchmetrics", "tyro")

check_extra("lab", "klformer.lab, the command line and training included,", MODULES)
