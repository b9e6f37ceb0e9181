"""What a user can choose about a conversion. Docstrings of fields are the help of the command line."""

from typing import Literal

from pydantic import Field, field_validator

from klformer.config import Config
from klformer.conversion.hosts import Extension
from klformer.errors import ArgumentError

Trained = Literal["kernels", "all"]


class ConversionConfig(Config):
    """How a model is converted, but for the attention that is put in.

    Raises:
        ArgumentError: a value is not allowed.

    Examples:
        >>> import klformer
        >>> klformer.ConversionConfig(steps=500, keep_softmax=1).learning_rate
        0.05
    """

    layers: tuple[int, ...] | None = None
    """Layers to convert, counted from 0 in the order in which they run; all if not given."""

    steps: int = Field(300, ge=0)
    """Steps of fitting the kernels, a batch each; it ends earlier if nothing is gained any more."""

    learning_rate: float = Field(0.05, gt=0)
    """Learning rate of the kernels."""

    error_budget: float = Field(0.1, gt=0)
    """Largest error of a layer, for an attention with num_frequencies=auto."""

    align_steps: int = Field(0, ge=0)
    """Steps after that in which the kernels alone learn, all together, what the teacher's layers give: errors of layers
    that add up."""

    finetune_steps: int = Field(0, ge=0)
    """Steps of distillation of the teacher's answers after that."""

    finetune: Trained = "all"
    """What they train."""

    finetune_learning_rate: float = Field(1e-4, gt=0)
    """Learning rate of all weights but the kernels', which take ten times as much."""

    label_weight: float = Field(0.0, ge=0)
    """What the loss of the task itself, masked or next words or classes, weighs beside the teacher's answers."""

    keep_softmax: int | float = Field(0, ge=0)
    """Layers that stay softmax, those with the largest errors; or, below 1, the error above which a layer does. Figures
    without them are in the certificate as well."""

    max_positions: int | None = Field(None, ge=1)
    """Tokens that the converted model is to read, if more than the teacher: learned position embeddings are extended.
    Batches may be as long; the teacher that they are compared with is extended, too."""

    extension: Extension = "repeat"
    """How learned position embeddings are made more: the same rows again, or drawn out."""

    seed: int = 0
    """Seed of everything that is random."""

    @property
    def all_steps(self) -> int:
        """Batches that are learned from, one after the other."""
        return self.steps + self.align_steps + self.finetune_steps

    @field_validator("keep_softmax")
    @classmethod
    def _check_whole(cls, value: int | float) -> int | float:
        if value > 1 and value != int(value):
            raise ArgumentError("must be a number of layers, or an error below 1")
        return value if 0 < value < 1 else int(value)
