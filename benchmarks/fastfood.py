"""`bench fastfood`: transforming every token against one matrix product with the blocks written out.

FastFood projects a token with d log d additions where a dense matrix takes d^2 multiplications, a block. Matrix
products run at the machine's full speed and the transform does not; this says from which head size on it pays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klformer.kernels import FastFoodSpectrum
from klformer.lab.bench.measure import round_times, spread, write_report
from klformer.lab.environment import describe_machine
from klformer.lab.tables import Table, number
from klformer.lab.terminal import make_console
from klformer.ops.hadamard import hadamard_transform


@dataclass(frozen=True)
class FastFoodBench:
    """Projections of a sequence on one block of FastFood frequencies, both ways, for growing head sizes.

    Example: klformer --plugin benchmarks bench fastfood
    """

    head_dims: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    """Head sizes d; powers of two."""
    length: int = 4096
    """Tokens."""
    repeats: int = 5
    """Rounds that are counted, after one to warm up."""
    json: Path | None = None
    """Write all figures to this file."""


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
    """Measure, print one row a head size, and write the figures where they were asked for."""
    environment = describe_machine()
    results = [_measure(size, options) for size in options.head_dims]
    title = f"projecting {options.length:,} tokens on d frequencies, {environment['date']}, {environment['machine']}"
    console = make_console(80)
    replace(fastfood_table(results), title=title).print(console)
    write_report(options.json, environment, {"options": asdict(options), "results": results}, console)


def fastfood_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each size: medians of both ways, and how they compare."""
    lines = []
    for row in results:
        transform, product = (row[way]["median"] for way in ("transform", "product"))
        lines.append(
            {
                "d": number(row["head_dim"], "{:,}"),
                "transform every token, ms": number(transform * 1e3),
                "form blocks + matrix product, ms": number(product * 1e3),
                "transform / product": number(transform / product, "{:.1f}x"),
            }
        )
    return Table.of(lines)


def _measure(size: int, options: FastFoodBench) -> dict[str, Any]:
    spectrum = FastFoodSpectrum(num_heads=1, head_dim=size, num_frequencies=size)
    x = torch.randn(options.length, size)
    ways = {"transform": partial(transform_tokens, spectrum, x), "product": partial(multiply_tokens, spectrum, x)}
    times = round_times(ways, repeats=options.repeats)
    return {"head_dim": size, "length": options.length, **{way: spread(seconds) for way, seconds in times.items()}}
