"""`klformer bench fastfood`: transforming every token against one matrix product with the blocks written out.

FastFood projects a token with d log d additions where a dense matrix takes d^2 multiplications, a block. Matrix
products run at the machine's full speed and the transform does not; this says from which head size on it pays.
"""

from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from klformer.bench.measure import median_times
from klformer.environment import describe_machine
from klformer.kernels import FastFoodSpectrum
from klformer.ops.hadamard import hadamard_transform


@dataclass(frozen=True)
class FastFoodBench:
    """Projections of a sequence on one block of FastFood frequencies, both ways, for growing head sizes.

    Example: klformer bench fastfood
    """

    head_dims: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    """Head sizes d; powers of two."""
    length: int = 4096
    """Tokens."""
    repeats: int = 5
    """Rounds that are counted, after one to warm up."""


def transform_tokens(spectrum: FastFoodSpectrum, x: Tensor) -> Tensor:
    """x V^T for one head and one block by two fast transforms of every token, x (L, d)."""
    scaling, gaussian, signs = (t[0, 0] for t in (spectrum.scaling, spectrum.gaussian, spectrum.signs))
    mixed = hadamard_transform(x * signs)[:, spectrum.permutation[0, 0]]
    scale = spectrum.lengthscale * spectrum.block_dim**0.5
    return hadamard_transform(mixed * gaussian) * (scaling / scale)


def multiply_tokens(spectrum: FastFoodSpectrum, x: Tensor) -> Tensor:
    """x V^T with V formed by fast transforms and then multiplied, as the library does it."""
    return x @ spectrum.frequencies()[0].T


@torch.no_grad()
def run(options: FastFoodBench) -> None:
    """Measure and print one row a head size."""
    console = Console()
    environment = describe_machine()
    table = Table(
        title=f"projecting {options.length:,} tokens on d frequencies, {environment['date']}, {environment['machine']}"
    )
    for column in ("d", "transform every token, ms", "form blocks + matrix product, ms", "transform / product"):
        table.add_column(column, justify="right")
    for size in options.head_dims:
        spectrum = FastFoodSpectrum(num_heads=1, head_dim=size, num_frequencies=size)
        x = torch.randn(options.length, size)
        ways = {
            "transform": partial(transform_tokens, spectrum, x),
            "product": partial(multiply_tokens, spectrum, x),
        }
        times = median_times(ways, repeats=options.repeats)
        ratio = times["transform"] / times["product"]
        table.add_row(str(size), f"{times['transform'] * 1e3:.2f}", f"{times['product'] * 1e3:.2f}", f"{ratio:.2f}x")
    console.print(table)
