"""`klformer bench`: the benchmarks by name."""

from collections.abc import Sequence

from klformer.bench import attention, denominators, fastfood, layer, ops, peers
from klformer.bench.model import command as model
from klformer.cli.subcommands import Subcommand, run_subcommand

BENCHMARKS: dict[str, Subcommand] = {
    "attention": (attention.AttentionBench, attention.run),
    "model": (model.ModelBench, model.run),
    "ops": (ops.OpsBench, ops.run),
    "peers": (peers.PeersBench, peers.run),
    "layer": (layer.LayerBench, layer.run),
    "fastfood": (fastfood.FastFoodBench, fastfood.run),
    "denominators": (denominators.DenominatorBench, denominators.run),
}


def main(arguments: Sequence[str]) -> None:
    """Run one of the benchmarks."""
    run_subcommand(BENCHMARKS, arguments, group="bench", description="Measure speed and memory.")
