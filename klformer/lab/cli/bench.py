"""`klformer bench NAME`: the benchmarks by name."""

from klformer.lab.cli.command import group
from klformer.registry import Registry

#: By name, the module with `run(options)`. A plugin may add its own.
BENCHMARKS: Registry[str] = Registry("benchmark")
for _name in ("attention", "model.command", "ops", "peers", "layer", "decode", "sequence"):
    BENCHMARKS.add(_name.partition(".")[0], f"klformer.lab.bench.{_name}")

COMMAND = group("Measure speed and memory.", BENCHMARKS)
