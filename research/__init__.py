"""The paper's theory and the evidence behind the docs: run from a clone, never installed.

    klformer --plugin research analyze turing

registers the analyses below beside those of a user's own runs. `research.evidence` keeps what commands wrote in
`research/data` and renders it as tables of pages; `research.draw` draws the figures. research/README.md is the index.
"""

from klformer.lab.cli.analyze import ANALYSES

for _name in ("pretraining", "gradients", "mse", "turing"):
    ANALYSES.add(_name, f"research.{_name}.command")
