"""`klformer analyze NAME`: the analyses by name."""

from klformer.lab.cli.command import group
from klformer.registry import Registry

#: By name, the module with `run(options)`. A plugin may add its own.
ANALYSES: Registry[str] = Registry("analysis")
for _name in ("variance.command", "eigenvalues", "kernel.command", "evidence.command"):
    ANALYSES.add(_name.partition(".")[0], f"klformer.lab.analysis.{_name}")

COMMAND = group("Check the paper's claims on trained runs.", ANALYSES)
