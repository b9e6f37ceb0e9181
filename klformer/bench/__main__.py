"""`python -m klformer.bench`: the benchmarks."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from klformer.bench import denominators, fastfood, layer, ops
from klformer.bench.subjects import Sizes


@dataclass(frozen=True)
class MemoryOfOne:
    """Print the extra peak memory of one subject in bytes; `ops` calls this in a new process for each."""

    name: str
    """Subject, as `ops` lists it."""
    sizes: Sizes


def main() -> None:
    choice = tyro.cli(
        Annotated[ops.OpsBench, tyro.conf.subcommand("ops")]
        | Annotated[layer.LayerBench, tyro.conf.subcommand("layer")]
        | Annotated[fastfood.FastFoodBench, tyro.conf.subcommand("fastfood")]
        | Annotated[denominators.DenominatorBench, tyro.conf.subcommand("denominators")]
        | Annotated[MemoryOfOne, tyro.conf.subcommand("memory")],
        prog="python -m klformer.bench",
        description="Measure the operators of klformer.",
    )
    match choice:
        case ops.OpsBench():
            ops.run(choice)
        case layer.LayerBench():
            layer.run(choice)
        case fastfood.FastFoodBench():
            fastfood.run(choice)
        case denominators.DenominatorBench():
            denominators.run(choice)
        case MemoryOfOne():
            ops.measure_memory(choice.name, choice.sizes)


if __name__ == "__main__":
    main()
