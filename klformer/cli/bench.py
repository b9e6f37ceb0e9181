"""`klformer bench NAME`: the benchmarks by name."""

from klformer.cli.command import group

#: By name, the module with `run(options)`.
BENCHMARKS = {
    "attention": "klformer.bench.attention",
    "model": "klformer.bench.model.command",
    "ops": "klformer.bench.ops",
    "peers": "klformer.bench.peers",
    "layer": "klformer.bench.layer",
    "decode": "klformer.bench.decode",
    "sequence": "klformer.bench.sequence",
    "fastfood": "klformer.bench.fastfood",
    "denominators": "klformer.bench.denominators",
    "few-queries": "klformer.bench.few_queries",
    "operator-shares": "klformer.bench.operator_shares",
    "layer-shares": "klformer.bench.layer_shares",
    "launches": "klformer.bench.launches",
}
COMMAND = group("benchmark", "Measure speed and memory.", BENCHMARKS)
