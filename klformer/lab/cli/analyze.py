"""`klformer analyze NAME`: the analyses by name."""

from klformer.lab.cli.command import group
from klformer.registry import Registry

#: By name, the module with `run(options)`. A plugin may add its own.
ANALYSES: Registry[str] = Registry("analysis")
for _name in ("variance", "eigenvalues", "kernel", "evidence"):
    ANALYSES.add(_name, f"klformer.lab.analysis.{_name}.command")

COMMAND = group("Check the paper's claims on trained runs.", ANALYSES)
