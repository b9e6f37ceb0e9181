"""Objectives, one a file."""

from klformer.training.objectives.classification import Classification, cross_entropy
from klformer.training.objectives.positions import PositionClassification
from klformer.training.objectives.regression import Regression

__all__ = ["Classification", "PositionClassification", "Regression", "cross_entropy"]
