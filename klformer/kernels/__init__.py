"""Kernels: distributions of frequencies, and what is made of them. The learnable distributions are registered here."""

from klformer.kernels.atoms import AtomSpectrum
from klformer.kernels.fastfood import FastFoodSpectrum
from klformer.kernels.gaussian import GaussianSpectrum
from klformer.kernels.generative import GenerativeSpectrum
from klformer.kernels.gmm import GaussianMixtureSpectrum
from klformer.kernels.kernel import Kernel
from klformer.kernels.spectrum import SPECTRA, SpectralDistribution

SPECTRA.add("gmm", GaussianMixtureSpectrum)
SPECTRA.add("fastfood", FastFoodSpectrum)
SPECTRA.add("generative", GenerativeSpectrum)
SPECTRA.add("atoms", AtomSpectrum)

__all__ = [
    "SPECTRA",
    "AtomSpectrum",
    "FastFoodSpectrum",
    "GaussianMixtureSpectrum",
    "GaussianSpectrum",
    "GenerativeSpectrum",
    "Kernel",
    "SpectralDistribution",
]
