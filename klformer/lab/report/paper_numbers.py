"""The paper's own results as data, as printed, each table with its name; misprints are listed, not mended.

The figures of memory, speed and variance are pictures in the paper without numbers, so that they are not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

LRA_TABLE = "LRA table: Experimental results on the LRA benchmark"
IMAGE_TABLE = "Image table: Experimental results on the Image dataset with 1024 tokens from LRA benchmark"
GLUE_TABLE = "GLUE table: Results on the GLUE benchmark after fine-tuning on respective tasks"
EIGENVALUE_TABLE = "Eigenvalue table: Distribution of Eigenvalues for GMM-RKS and GMM-PRF models"

#: The tasks over which the LRA table averages; Image stands in a table of its own.
LRA_TASKS = ("listops", "text", "retrieval")
#: The tasks of both tables, with the paper's names for them.
PAPER_TASKS = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image"}


def task_title(name: str) -> str:
    """Return the paper's name for a task, or the name itself if the paper does not have it."""
    return PAPER_TASKS.get(name, name)


@dataclass(frozen=True)
class LraRow:
    """A row of the LRA table with its figure of the Image table; accuracies in percent."""

    model: str
    #: The name of the attention in this library; None for the random predictor.
    attention: str | None
    complexity: str
    listops: float
    text: float
    retrieval: float
    #: As printed.
    average: float
    image: float

    def accuracy(self, task: str) -> float | None:
        """Return the accuracy in percent, None if it is not a task of the two tables."""
        return {"listops": self.listops, "text": self.text, "retrieval": self.retrieval, "image": self.image}.get(task)

    def row_average(self) -> float:
        """Return the average of the row's three figures, which is not always what is printed."""
        return fmean((self.listops, self.text, self.retrieval))

    def average_is_misprinted(self) -> bool:
        return abs(self.row_average() - self.average) > 0.0051


RANDOM = LraRow("Random predictor", None, "", 10.00, 50.00, 50.00, 36.67, 10.00)
LRA: tuple[LraRow, ...] = (
    LraRow("Transformer", "softmax", "L²", 36.38, 64.27, 57.46, 52.70, 42.44),
    LraRow("Synthesizer", "synthesizer", "L²", 36.50, 61.68, 54.67, 50.95, 41.61),
    LraRow("Sinkhorn", "sinkhorn", "(L/B)²", 34.20, 61.20, 53.83, 49.74, 41.23),
    LraRow("Sparse Transformer", "sparse", "L√L", 35.78, 63.58, 59.59, 52.98, 44.24),
    LraRow("Reformer", "reformer", "L log L", 36.30, 56.10, 53.40, 48.60, 38.07),
    LraRow("Local attention", "local", "LK", 15.95, 52.98, 53.39, 40.77, 41.46),
    LraRow("Longformer", "longformer", "LK", 36.03, 62.85, 56.89, 51.92, 42.22),
    LraRow("Linformer", "linformer", "L", 35.49, 53.49, 52.27, 52.56, 38.56),
    LraRow("BigBird", "bigbird", "LK", 37.08, 64.02, 59.29, 53.46, 40.83),
    LraRow("Linear-ELU", "linear-elu", "L", 17.15, 65.90, 53.09, 45.38, 42.34),
    LraRow("Performer", "performer", "L", 36.00, 65.40, 53.82, 51.74, 42.77),
    LraRow("GMM-RKS", "gmm-rks", "L", 18.55, 63.95, 58.64, 47.05, 42.33),
    LraRow("FastFood-RKS", "fastfood-rks", "L", 18.65, 65.67, 61.92, 48.75, 36.74),
    LraRow("Generative-RKS", "generative-rks", "L", 18.50, 66.50, 64.76, 49.92, 39.84),
    LraRow("GMM-PRF", "gmm-prf", "L", 36.96, 62.64, 65.27, 54.96, 39.94),
    LraRow("FastFood-PRF", "fastfood-prf", "L", 37.05, 64.66, 71.13, 57.61, 38.31),
    LraRow("Generative-PRF", "generative-prf", "L", 37.42, 62.90, 69.81, 56.71, 40.01),
)
#: How the figures of the two tables came about, in the paper's words where they matter.
LRA_PROTOCOL = (
    "The paper's figures are for the test set, for Text the validation set; its own models are averaged over 100 runs, "
    "and its baselines are quoted from Long Range Arena."
)

#: A number of the GLUE table: the task, its metric, and the part of a run's result that has it.
GlueCell = tuple[str, str, str]
#: The columns of the GLUE table, with the paper's names of the tasks.
GLUE_CELLS: Mapping[GlueCell, str] = {
    ("sst2", "accuracy", "test"): "SST2",
    ("mrpc", "accuracy", "test"): "MRPC",
    ("mrpc", "f1", "test"): "MRPC",
    ("qqp", "accuracy", "test"): "QQP",
    ("qqp", "f1", "test"): "QQP",
    ("mnli", "accuracy", "test"): "MNLI-m",
    ("mnli", "accuracy", "mismatched"): "MNLI-mm",
    ("qnli", "accuracy", "test"): "QNLI",
    ("wnli", "accuracy", "test"): "WNLI",
    ("rte", "accuracy", "test"): "RTE",
    ("cola", "matthews", "test"): "CoLA",
}
#: By attention, in the order of GLUE_CELLS.
GLUE: Mapping[str, tuple[float, ...]] = {
    "softmax": (0.81, 0.70, 0.82, 0.83, 0.76, 0.64, 0.64, 0.68, 0.56, 0.60, 0.18),
    "fastfood-rks": (0.83, 0.71, 0.82, 0.81, 0.74, 0.57, 0.57, 0.64, 0.59, 0.56, 0.13),
    "gmm-rks": (0.80, 0.70, 0.82, 0.77, 0.69, 0.47, 0.48, 0.60, 0.61, 0.57, 0.07),
    "generative-rks": (0.81, 0.70, 0.82, 0.81, 0.73, 0.59, 0.58, 0.63, 0.62, 0.58, 0.16),
    "fastfood-prf": (0.81, 0.71, 0.82, 0.81, 0.74, 0.56, 0.57, 0.64, 0.59, 0.58, 0.12),
    "generative-prf": (0.80, 0.71, 0.82, 0.80, 0.74, 0.56, 0.56, 0.61, 0.60, 0.55, 0.10),
    "gmm-prf": (0.82, 0.71, 0.82, 0.81, 0.74, 0.56, 0.56, 0.64, 0.59, 0.59, 0.21),
}
#: "Ablation studies using FastFood variants on the GLUE benchmark", by what is learned; the paper's is FastFood-RKS.
FASTFOOD_GLUE = {
    "none": (0.814, 0.713, 0.820, 0.811, 0.738, 0.571, 0.568, 0.629, 0.634, 0.563, 0.152),
    "s": (0.807, 0.706, 0.822, 0.810, 0.741, 0.571, 0.571, 0.642, 0.606, 0.570, 0.101),
    "sgb": (0.828, 0.707, 0.820, 0.810, 0.739, 0.569, 0.572, 0.638, 0.592, 0.563, 0.129),
}


def glue_row(attention: str, options: Mapping[str, object]) -> dict[GlueCell, float]:
    """Return the paper's numbers for an attention; empty if it has none."""
    row = GLUE.get(attention)
    if attention == "fastfood-rks":
        row = FASTFOOD_GLUE.get(str(options.get("learn", "sgb")), row)
    return {} if row is None else dict(zip(GLUE_CELLS, row, strict=True))


@dataclass(frozen=True)
class EigenvalueTable:
    """The eigenvalues of one model: the summary as printed, and the table by layer and head."""

    task: str
    attention: str
    table: str
    printed_maximum: float
    printed_mean: float
    #: Minimum, maximum and mean; three layers of four heads, though the configuration has four layers.
    heads: tuple[tuple[float, float, float], ...]

    def maximum(self) -> float:
        return max(maximum for _, maximum, _ in self.heads)

    def mean(self) -> float:
        return fmean(mean for _, _, mean in self.heads)


HEADS_PER_LAYER = 4
EIGENVALUES: tuple[EigenvalueTable, ...] = (
    EigenvalueTable(
        "text", "gmm-rks", "Distribution of Eigenvalues of covariances of GMM-RKS model for the Text task",
        0.486, 0.031,
        (
            (7.601e-7, 4.584e-1, 3.531e-2), (2.380e-8, 4.863e-1, 3.576e-2), (1.400e-5, 4.469e-1, 3.319e-2),
            (4.214e-6, 4.197e-1, 3.208e-2), (4.242e-6, 2.790e-1, 3.070e-2), (2.971e-6, 3.238e-1, 3.161e-2),
            (5.081e-6, 2.842e-1, 3.078e-2), (5.212e-7, 3.006e-1, 3.086e-2), (2.297e-6, 2.219e-1, 2.872e-2),
            (7.094e-6, 2.036e-1, 2.594e-2), (1.074e-7, 1.953e-1, 2.772e-2), (6.330e-9, 1.836e-1, 2.442e-2),
        ),
    ),
    EigenvalueTable(
        "text", "gmm-prf", "Distribution of Eigenvalues of covariances of GMM-PRF model for the Text task",
        0.096, 0.025,
        (
            (1.363e-5, 9.660e-2, 2.440e-2), (6.659e-5, 7.900e-2, 2.200e-2), (7.241e-6, 9.050e-2, 2.810e-2),
            (2.760e-5, 7.790e-2, 2.630e-2), (2.068e-5, 7.520e-2, 2.430e-2), (2.386e-5, 7.580e-2, 2.400e-2),
            (7.256e-6, 7.400e-2, 2.370e-2), (1.911e-4, 8.080e-2, 2.680e-2), (2.871e-5, 6.710e-2, 2.570e-2),
            (6.117e-6, 7.370e-2, 2.190e-2), (7.830e-6, 6.600e-2, 2.010e-2), (2.186e-5, 7.620e-2, 2.810e-2),
        ),
    ),
    EigenvalueTable(
        "retrieval", "gmm-rks", "Distribution of Eigenvalues of covariances of GMM-RKS model for the Retrieval task",
        0.499, 0.053,
        (
            (4.011e-5, 4.994e-1, 5.998e-2), (4.250e-5, 2.294e-1, 5.390e-2), (1.918e-4, 3.427e-1, 5.842e-2),
            (5.615e-6, 3.943e-1, 5.866e-2), (3.232e-6, 2.605e-1, 5.469e-2), (2.746e-6, 2.581e-1, 5.333e-2),
            (6.364e-6, 2.329e-1, 5.091e-2), (2.071e-5, 1.743e-1, 5.020e-2), (4.358e-5, 1.919e-1, 5.157e-2),
            (1.143e-4, 1.738e-1, 4.819e-2), (2.546e-5, 1.735e-1, 4.705e-2), (9.697e-7, 2.075e-1, 4.982e-2),
        ),
    ),
    EigenvalueTable(
        "retrieval", "gmm-prf", "Distribution of Eigenvalues of covariances of GMM-PRF model for the Retrieval task",
        0.186, 0.042,
        (
            (8.225e-5, 2.114e-1, 4.818e-2), (5.386e-5, 1.525e-1, 4.066e-2), (9.659e-5, 1.707e-1, 5.638e-2),
            (1.498e-7, 1.467e-1, 4.166e-2), (1.294e-6, 9.798e-2, 3.024e-2), (9.306e-5, 1.289e-1, 4.334e-2),
            (4.300e-6, 1.865e-1, 4.846e-2), (2.418e-5, 1.047e-1, 4.458e-2), (2.466e-8, 1.133e-1, 3.987e-2),
            (2.291e-4, 1.429e-1, 5.099e-2), (3.997e-5, 1.134e-1, 3.380e-2), (6.653e-5, 1.129e-1, 2.827e-2),
        ),
    ),
)  # fmt: skip

#: What is wrong in the tables themselves; the tests hold each.
ERRATA: dict[str, str] = {
    "linformer-average": "Linformer's average is printed as 52.56; its row averages 47.08, which is shown here.",
    "eigenvalue-maximum": (
        "The largest eigenvalue of GMM-PRF on Retrieval is printed as 0.186; its table by heads has 0.211."
    ),
    "eigenvalue-layers": "The eigenvalue tables have three layers; the paper's configuration has four.",
}
