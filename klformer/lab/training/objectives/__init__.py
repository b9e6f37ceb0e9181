"""Objectives, one a file."""

from klformer.lab.training.objectives.classification import Classification, cross_entropy
from klformer.lab.training.objectives.masked_lm import MaskedLanguageModelling
from klformer.lab.training.objectives.position_regression import PositionRegression
from klformer.lab.training.objectives.positions import PositionClassification
from klformer.lab.training.objectives.regression import Regression
from klformer.lab.training.objectives.scored import BinaryF1, Correlation, Matthews

__all__ = [
    "BinaryF1",
    "Classification",
    "Correlation",
    "MaskedLanguageModelling",
    "Matthews",
    "PositionClassification",
    "PositionRegression",
    "Regression",
    "cross_entropy",
]
