"""`python -m klformer.lab.bench`: one measurement in a process of its own, which a benchmark has started."""

import importlib
import sys
from collections.abc import Sequence

import tyro
from pydantic import ValidationError

from klformer.config import describe_problems
from klformer.errors import ArgumentError, UserError
from klformer.plugins import load_plugins


def main(arguments: Sequence[str]) -> None:
    """Print what is measured; the first argument names it, the others are its options.

    Raises:
        ArgumentError: there is no such measurement.
    """
    name, *flags = arguments
    # A process imports what it measures and nothing else: importing is most of its time.
    match name:
        case "memory":
            from klformer.lab.bench import ops

            ops.measure_memory(tyro.cli(ops.OpMemory, args=flags))
        case "attention-memory":
            from klformer.lab.bench import attention

            attention.measure_memory(tyro.cli(attention.AttentionMemory, args=flags))
        case "peers-memory":
            from klformer.lab.bench import peers

            peers.measure_memory(tyro.cli(peers.PeerMemory, args=flags))
        case "ops" | "attention" | "peers":  # the benchmark itself, in another environment
            benchmark = importlib.import_module(f"klformer.lab.bench.{name}")
            options = {"ops": "OpsBench", "attention": "AttentionBench", "peers": "PeersBench"}[name]
            benchmark.run(tyro.cli(getattr(benchmark, options), args=flags))
        case "model-step":
            from klformer.lab.bench.model import step

            step.print_step(tyro.cli(step.ModelStep, args=flags))
        case _:
            raise ArgumentError(f"there is no measurement {name!r}")


if __name__ == "__main__":
    try:
        load_plugins()  # those of the process that has started this one
        main(sys.argv[1:])
    except ValidationError as error:
        sys.exit(describe_problems(error))
    except UserError as error:
        sys.exit(str(error))
