"""`python -m klformer.bench`: one measurement in a process of its own, which a benchmark has started."""

import sys

import tyro

from klformer.bench import attention, ops, peers
from klformer.bench.model import step
from klformer.plugins import load_plugins

#: Options of a measurement, and what prints its result.
MEASUREMENTS = {
    "memory": (ops.OpMemory, ops.measure_memory),
    "attention-memory": (attention.AttentionMemory, attention.measure_memory),
    "peers-memory": (peers.PeerMemory, peers.measure_memory),
    "model-step": (step.ModelStep, step.print_step),
}

if __name__ == "__main__":
    # Those of the process that has started this one.
    load_plugins()
    options, measure = MEASUREMENTS[sys.argv[1]]
    measure(tyro.cli(options, args=sys.argv[2:]))  # type: ignore[operator]
