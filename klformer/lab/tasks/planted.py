"""Attention with a kernel that is known: queries, keys and values are given, and the kernel is all that is to be found.

A position is the vector (q, k, v) with q, k ~ N(0, I) in R^D and one value v ~ N(0, 1); its target is

    y_i = sum_j kappa(q_i, k_j) v_j / sum_j kappa(q_i, k_j)

There are no projections, so that nothing can take the place of the kernel: whether a kernel can be learned, and which
distribution of frequencies learns which kernel, shows in the error and in the kernel itself (`klformer analyze
kernel`). A factor of the kernel cancels; it is not learned.
"""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from klformer.attention import AttentionSpec
from klformer.kernels import exact
from klformer.lab.data.sequences import Examples, Sequences
from klformer.lab.tasks.base import GeneratedTask
from klformer.lab.tasks.config import DataConfig, GeneratedData
from klformer.lab.tasks.presets import ANY, LRA_OPTIMISER, SMALL_TRAINING, Preset
from klformer.lab.training.objective import Objective
from klformer.lab.training.objectives import PositionRegression

KernelName = Literal["periodic", "gaussian", "mixture", "softmax"]
#: As functions of queries and keys that were multiplied by D^(-1/4), as all kernels take them.
KERNELS: Mapping[KernelName, Callable[[Tensor, Tensor], Tensor]] = {
    "periodic": lambda q, k: exact.periodic_kernel(q, k, frequency=3.0),
    "gaussian": lambda q, k: exact.gaussian_kernel(q, k, lengthscale=0.4),
    "mixture": lambda q, k: (exact.gaussian_kernel(q, k, 0.3) + exact.gaussian_kernel(q, k, 1.5)) / 2,
    "softmax": lambda q, k: exact.softmax_kernel(q / math.sqrt(0.4), k / math.sqrt(0.4)),
}
DIM, LENGTH = 4, 32

PRESETS: Mapping[str, Preset] = {
    "laptop": {
        "optimiser": {**LRA_OPTIMISER, "learning_rate": 3e-2, "weight_decay": 0.0},
        "schedule": {"kind": "cosine", "warmup_steps": 20},
        "training": {
            **SMALL_TRAINING, "batch_size": 32, "max_steps": 800, "evaluate_every": 100, "checkpoint_every": 200,
        },
        "attention": {ANY: {"num_frequencies": 128}},
    },
}  # fmt: skip


class PlantedData(GeneratedData):
    """Which kernel is to be found, in how many dimensions."""

    kernel: KernelName = "periodic"
    """periodic: (1 + mean over dimensions of cos(3 d)) / 2. gaussian: a sharp one, of width 0.4. mixture: a sharp and a
    broad Gaussian, of width 0.3 and 1.5. softmax: exp(q.k / 0.4), a low temperature."""

    dim: int = Field(DIM, ge=1)
    """Size D of queries and keys."""


class Planted(GeneratedTask):
    """A number for every position; 2,000 sequences of 32 positions for training unless `num_examples` and `max_len` say
    otherwise, and 200 each for validation and test.

    Its model is one attention of one head on the given queries and keys.

    Examples:
        >>> import torch
        >>> from klformer import AttentionSpec
        >>> from klformer.lab.tasks import TASKS
        >>> task = TASKS["planted"](TASKS["planted"].data_config(kernel="gaussian", dim=2, num_examples=100))
        >>> train = task.load("train")
        >>> train.first[0].shape, train.targets.shape  # a query, a key and a value of each position
        ((32, 5), (100, 32))
        >>> q, k = torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> task.kernel(q, k)
        tensor([[1.0000, 0.1097]])
        >>> model = task.model(AttentionSpec(name="gmm-rks"))
        >>> model(torch.randn(4, 32, 5)).shape
        torch.Size([4, 32, 1])
    """

    name: ClassVar[str] = "planted"
    title: ClassVar[str] = "Planted"
    summary: ClassVar[str] = "outputs of attention with a known kernel on given queries and keys (generated)"
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    input_dim: int | None = 2 * DIM + 1
    data_config: ClassVar[type[DataConfig]] = PlantedData
    default_max_len: ClassVar[int] = LENGTH
    default_num_examples: ClassVar[int] = 2_000
    held_out: ClassVar[int] = 200

    config: PlantedData

    def _set_up(self) -> None:
        self.input_dim = 2 * self.config.dim + 1

    def detail(self) -> str:
        """Return the kernel, because each is a task of its own; dimensions and length where they are not the usual
        ones."""
        parts = [
            self.config.kernel,
            f"dim {self.config.dim}" if self.config.dim != DIM else "",
            f"length {self.max_len}" if self.max_len != LENGTH else "",
        ]
        return " ".join(filter(None, parts))

    def objective(self) -> Objective:
        return PositionRegression(max_len=self.max_len)

    def model(self, attention: AttentionSpec | tuple[AttentionSpec, ...]) -> nn.Module:
        chosen = attention if isinstance(attention, AttentionSpec) else attention[0]
        return KernelReadout(chosen, dim=self.config.dim, max_len=self.max_len)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the planted kernel (..., L, S) of queries and keys as they are in the data.

        Args:
            q: Queries (..., L, D).
            k: Keys (..., S, D).
        """
        scale = self.config.dim**-0.25
        return KERNELS[self.config.kernel](q * scale, k * scale)

    def _make(self, generator: np.random.Generator, count: int) -> Examples:
        inputs = generator.standard_normal((count, self.max_len, 2 * self.config.dim + 1), np.float32)
        q, k, v = split_inputs(torch.from_numpy(inputs).double())
        weights = self.kernel(q, k)
        targets = (weights @ v).squeeze(-1) / weights.sum(-1)
        return Examples(Sequences.from_matrix(inputs), targets.numpy())


def split_inputs(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split inputs (..., 2 D + 1) into queries, keys (..., D) and values (..., 1)."""
    dim = (inputs.shape[-1] - 1) // 2
    return inputs[..., :dim], inputs[..., dim : 2 * dim], inputs[..., 2 * dim :]


class KernelReadout(nn.Module):
    """Attention of one head on given queries, keys and values, and a line through its outputs.

    The line is there for kernels that learn nothing: they train as all others do.
    """

    def __init__(self, attention: AttentionSpec, *, dim: int, max_len: int) -> None:
        super().__init__()
        self.mechanism = attention.build(num_heads=1, head_dim=dim, value_dim=1, max_len=max_len)
        self.slope = nn.Parameter(torch.ones(()))
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Compute outputs (B, L, 1) of inputs (B, L, 2 D + 1) with key_mask (B, L), True = keep."""
        q, k, v = (part.unsqueeze(1) for part in split_inputs(inputs))
        return self.slope * self.mechanism(q, k, v, key_mask=key_mask).squeeze(1) + self.offset
