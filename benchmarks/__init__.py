"""Benchmarks that settled one decision: run from a clone, never installed.

    klformer --plugin benchmarks bench few-queries

registers them beside `klformer bench ops` and the others that users have.
"""

from klformer.lab.cli.bench import BENCHMARKS

for _name in (
    "fastfood",
    "denominators",
    "few-queries",
    "operator-shares",
    "layer-shares",
    "launches",
    "kernels",
    "roofline",
):
    BENCHMARKS.add(_name, f"benchmarks.{_name.replace('-', '_')}")
