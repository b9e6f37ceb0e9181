"""The analyses by name: `klformer analyze NAME`."""

from collections.abc import Callable, Sequence
from typing import Any

import tyro

from klformer.experiments.analyze import eigenvalues, gradients, kernel, mse, turing, variance

ANALYSES: dict[str, tuple[type, Callable[[Any], None]]] = {
    "variance": (variance.VarianceAnalysis, variance.run),
    "eigenvalues": (eigenvalues.EigenvalueAnalysis, eigenvalues.run),
    "kernel": (kernel.KernelAnalysis, kernel.run),
    "gradients": (gradients.GradientAnalysis, gradients.run),
    "mse": (mse.MseAnalysis, mse.run),
    "turing": (turing.TuringAnalysis, turing.run),
}


def main(arguments: Sequence[str]) -> None:
    """Run one of the analyses."""
    choice = tyro.extras.subcommand_cli_from_dict(
        {name: options for name, (options, _) in ANALYSES.items()},
        args=list(arguments),
        prog="klformer analyze",
        description="Check the paper's claims on trained runs. `klformer analyze NAME --help` says more.",
    )
    for options, run in ANALYSES.values():
        if isinstance(choice, options):
            run(choice)
