"""The laboratory: tasks, training, runs, benchmarks, analyses, reports and the command `klformer`.

It imports the library; the library never imports it.
"""

from klformer.errors import check_extra

check_extra(
    "lab",
    "klformer.lab, the command line and training included,",
    (
        "accelerate",
        "datasets",
        "jinja2",
        "matplotlib",
        "numpy",
        "PIL",
        "pyarrow",
        "rich",
        "tensorboard",
        "tokenizers",
        "torchmetrics",
        "tyro",
    ),
)
