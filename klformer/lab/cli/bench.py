"""`klformer bench NAME`: the benchmarks by name."""

from klformer.lab.cli.command import group

#: By name, the module with `run(options)`.
BENCHMARKS = {
    "attention": "klformer.lab.bench.attention",
    "model": "klformer.lab.bench.model.command",
    "ops": "klformer.lab.bench.ops",
    "peers": "klformer.lab.bench.peers",
    "layer": "klformer.lab.bench.layer",
    "decode": "klformer.lab.bench.decode",
    "sequence": "klformer.lab.bench.sequence",
    "fastfood": "klformer.lab.bench.fastfood",
    "denominators": "klformer.lab.bench.denominators",
    "few-queries": "klformer.lab.bench.few_queries",
    "operator-shares": "klformer.lab.bench.operator_shares",
    "layer-shares": "klformer.lab.bench.layer_shares",
    "launches": "klformer.lab.bench.launches",
}
COMMAND = group("benchmark", "Measure speed and memory.", BENCHMARKS)
