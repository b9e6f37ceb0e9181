"""The paper's tables on GLUE, to be shown beside ours: the models, and the variants of FastFood."""

from collections.abc import Mapping

#: A cell of a table: the task, the metric, and the part of the result.
Cell = tuple[str, str, str]
CELLS: tuple[Cell, ...] = (
    ("sst2", "accuracy", "test"),
    ("mrpc", "accuracy", "test"),
    ("mrpc", "f1", "test"),
    ("qqp", "accuracy", "test"),
    ("qqp", "f1", "test"),
    ("mnli", "accuracy", "test"),
    ("mnli", "accuracy", "mismatched"),
    ("qnli", "accuracy", "test"),
    ("wnli", "accuracy", "test"),
    ("rte", "accuracy", "test"),
    ("cola", "matthews", "test"),
)
#: Ours alone.
MORE_CELLS: tuple[Cell, ...] = (("stsb", "pearson", "test"), ("stsb", "spearman", "test"))

#: "Results on the GLUE benchmark after fine-tuning on respective tasks", in the order of CELLS.
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
_FASTFOOD = {
    "none": (0.814, 0.713, 0.820, 0.811, 0.738, 0.571, 0.568, 0.629, 0.634, 0.563, 0.152),
    "s": (0.807, 0.706, 0.822, 0.810, 0.741, 0.571, 0.571, 0.642, 0.606, 0.570, 0.101),
    "sgb": (0.828, 0.707, 0.820, 0.810, 0.739, 0.569, 0.572, 0.638, 0.592, 0.563, 0.129),
}


def paper_row(attention: str, options: Mapping[str, object]) -> dict[Cell, float]:
    """The paper's numbers for an attention; nothing if it has none."""
    row = GLUE.get(attention)
    if attention == "fastfood-rks":
        row = _FASTFOOD.get(str(options.get("learn", "sgb")), row)
    return {} if row is None else dict(zip(CELLS, row, strict=True))
