"""The benchmarks by name: `klformer bench NAME`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from klformer.bench import attention, denominators, fastfood, layer, ops, peers
from klformer.bench.subjects import Sizes
from klformer.subcommands import Subcommand, run_subcommand


@dataclass(frozen=True)
class MemoryOfOne:
    """Print the extra peak memory of one subject in bytes; `ops` calls this in a new process for each."""

    name: str
    """Subject, as `ops` lists it."""
    sizes: Sizes


BENCHMARKS: dict[str, Subcommand] = {
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


def main(arguments: Sequence[str], more: Mapping[str, Subcommand] = MappingProxyType({})) -> None:
    """Run one of the benchmarks; `more` are those of higher layers."""
    run_subcommand(BENCHMARKS | dict(more), arguments, group="bench", description="Measure speed and memory.")
