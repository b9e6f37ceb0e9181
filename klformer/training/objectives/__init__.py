"""Objectives, one a file."""

from klformer.training.objectives.classification import Classification, cross_entropy
from klformer.training.objectives.masked_lm import MaskedLanguageModelling
from klformer.training.objectives.position_regression import PositionRegression
from klformer.training.objectives.positions import PositionClassification
from klformer.training.objectives.regression import Regression
from klformer.training.objectives.scored import BinaryF1, Correlation, Matthews

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
