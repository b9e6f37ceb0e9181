"""The analyses by name: `klformer analyze NAME`."""

from collections.abc import Sequence

from klformer.analysis.eigenvalues import command as eigenvalues
from klformer.analysis.gradients import command as gradients
from klformer.analysis.kernel import command as kernel
from klformer.analysis.mse import command as mse
from klformer.analysis.turing import command as turing
from klformer.analysis.variance import command as variance
from klformer.cli.subcommands import Subcommand, run_subcommand

ANALYSES: dict[str, Subcommand] = {
    "variance": (variance.VarianceAnalysis, variance.run),
    "eigenvalues": (eigenvalues.EigenvalueAnalysis, eigenvalues.run),
    "kernel": (kernel.KernelAnalysis, kernel.run),
    "gradients": (gradients.GradientAnalysis, gradients.run),
    "mse": (mse.MseAnalysis, mse.run),
    "turing": (turing.TuringAnalysis, turing.run),
}


def main(arguments: Sequence[str]) -> None:
    """Run one of the analyses."""
    run_subcommand(ANALYSES, arguments, group="analyze", description="Check the paper's claims on trained runs.")
