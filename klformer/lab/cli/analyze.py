"""`klformer analyze NAME`: the analyses by name."""

from klformer.lab.cli.command import group

#: By name, the module with `run(options)`.
ANALYSES = {
    "variance": "klformer.lab.analysis.variance.command",
    "eigenvalues": "klformer.lab.analysis.eigenvalues.command",
    "kernel": "klformer.lab.analysis.kernel.command",
    "evidence": "klformer.lab.analysis.evidence.command",
    "pretraining": "klformer.lab.analysis.pretraining.command",
    "gradients": "klformer.lab.analysis.gradients.command",
    "mse": "klformer.lab.analysis.mse.command",
    "turing": "klformer.lab.analysis.turing.command",
}
COMMAND = group("analysis", "Check the paper's claims on trained runs.", ANALYSES)
