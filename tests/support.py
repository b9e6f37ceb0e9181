"""Shared by the tests: small problems, and flags for runs that take seconds."""

from klformer.testing.problems import (  # noqa: F401
    BATCH,
    FREQUENCIES,
    HEAD_DIM,
    HEADS,
    KEYS,
    MAX_LEN,
    QUERIES,
    VALUE_DIM,
    Operands,
    build,
    half_masked,
    operands,
    problem,
    relative_error,
    small_options,
)

#: Flags of `klformer train` and `compare` for a model and a training that take seconds.
TINY_MODEL = [
    *["--model.num-layers", "1", "--model.model-dim", "8", "--model.head-dim", "4", "--model.ffn-dim", "8"],
    *["--training.batch-size", "16", "--training.max-steps", "6", "--training.evaluate-every", "3"],
    *["--training.checkpoint-every", "3", "--training.evaluation-draws", "2"],
]
#: The same with data of the sparsity task.
TINY = [
    *["--data.num-examples", "450", "--data.max-len", "9", "--data.validation-limit", "45", "--data.test-limit", "45"],
    *TINY_MODEL,
]
