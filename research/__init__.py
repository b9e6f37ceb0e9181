"""The paper's theory and the evidence behind the docs: run from a clone, never installed.

    klformer --plugin research analyze turing

registers the analyses below beside those of a user's own runs. `research.evidence` keeps what commands wrote in
`docs/evidence` and makes the tables of the docs of it.
"""

from klformer.lab.cli.analyze import ANALYSES

for _name in ("pretraining", "gradients", "mse", "turing"):
    ANALYSES.add(_name, f"research.{_name}.command")
