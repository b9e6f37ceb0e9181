"""The benchmarks by name: `klformer bench NAME`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import tyro

from klformer.bench import attention, denominators, fastfood, layer, ops, peers
from klformer.bench.subjects import Sizes


@dataclass(frozen=True)
class MemoryOfOne:
    """Print the extra peak memory of one subject in bytes; `ops` calls this in a new process for each."""

    name: str
    """Subject, as `ops` lists it."""
    sizes: Sizes


#: Options, and what to do with them.
Benchmark = tuple[type, Callable[[Any], None]]

BENCHMARKS: dict[str, Benchmark] = {
    "attention": (attention.AttentionBench, attention.run),
    "ops": (ops.OpsBench, ops.run),
    "peers": (peers.PeersBench, peers.run),
    "layer": (layer.LayerBench, layer.run),
    "fastfood": (fastfood.FastFoodBench, fastfood.run),
    "denominators": (denominators.DenominatorBench, denominators.run),
    "memory": (MemoryOfOne, lambda one: ops.measure_memory(one.name, one.sizes)),
    "attention-memory": (attention.AttentionMemory, attention.measure_memory),
    "peers-memory": (peers.PeerMemory, peers.measure_memory),
}


def main(arguments: Sequence[str], more: Mapping[str, Benchmark] = MappingProxyType({})) -> None:
    """Run one of the benchmarks; `more` are those of higher layers."""
    benchmarks = BENCHMARKS | dict(more)
    choice = tyro.extras.subcommand_cli_from_dict(
        {name: options for name, (options, _) in benchmarks.items()},
        args=list(arguments),
        prog="klformer bench",
        description="Measure speed and memory. `klformer bench NAME --help` says more.",
    )
    for options, run in benchmarks.values():
        if isinstance(choice, options):
            run(choice)
