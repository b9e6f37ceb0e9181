"""`klformer analyze NAME`: the analyses by name."""

from klformer.cli.command import group

#: By name, the module with `run(options)`.
ANALYSES = {
    "variance": "klformer.analysis.variance.command",
    "eigenvalues": "klformer.analysis.eigenvalues.command",
    "kernel": "klformer.analysis.kernel.command",
    "evidence": "klformer.analysis.evidence.command",
    "pretraining": "klformer.analysis.pretraining.command",
    "gradients": "klformer.analysis.gradients.command",
    "mse": "klformer.analysis.mse.command",
    "turing": "klformer.analysis.turing.command",
}
COMMAND = group("analysis", "Check the paper's claims on trained runs.", ANALYSES)
