"""The benchmarks by name: `klformer bench NAME`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from klformer.bench import attention, denominators, fastfood, layer, ops
from klformer.bench.subjects import Sizes


@dataclass(frozen=True)
class MemoryOfOne:
    """Print the extra peak memory of one subject in bytes; `ops` calls this in a new process for each."""

    name: str
    """Subject, as `ops` lists it."""
    sizes: Sizes


BENCHMARKS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "attention": (attention.AttentionBench, attention.run),
    "ops": (ops.OpsBench, ops.run),
    "layer": (layer.LayerBench, layer.run),
    "fastfood": (fastfood.FastFoodBench, fastfood.run),
    "denominators": (denominators.DenominatorBench, denominators.run),
    "memory": (MemoryOfOne, lambda one: ops.measure_memory(one.name, one.sizes)),
    "attention-memory": (attention.AttentionMemory, attention.measure_memory),
}


def main(arguments: Sequence[str]) -> None:
    """Run one of the benchmarks."""
    choice = tyro.extras.subcommand_cli_from_dict(
        {name: options for name, (options, _) in BENCHMARKS.items()},
        args=list(arguments),
        prog="klformer bench",
        description="Measure speed and memory. `klformer bench NAME --help` says more.",
    )
    for options, run in BENCHMARKS.values():
        if isinstance(choice, options):
            run(choice)
