"""Confusions, F1 and calibration are those of torchmetrics."""

import pytest
import torch
from torchmetrics.functional.classification import (
    multiclass_calibration_error,
    multiclass_confusion_matrix,
    multiclass_f1_score,
)

from klformer.lab.training.metrics import BINS, ClassReport
from klformer.lab.training.objectives import Classification


@pytest.mark.parametrize("classes", [2, 5])
def test_against_torchmetrics(classes):
    generator = torch.Generator().manual_seed(classes)
    scores = 2 * torch.randn(211, classes, generator=generator)
    targets = (scores + torch.randn(211, classes, generator=generator)).argmax(1)
    probabilities = scores.softmax(1)
    report = ClassReport.of(probabilities, targets)
    said = probabilities.argmax(1)
    assert torch.equal(report.confusion, multiclass_confusion_matrix(said, targets, classes))
    torch.testing.assert_close(report.f1, multiclass_f1_score(said, targets, classes, average="none"))
    expected = multiclass_calibration_error(probabilities, targets, classes, n_bins=BINS).item()
    assert report.calibration_error == pytest.approx(expected, abs=1e-6)
    assert Classification(num_classes=classes).details(probabilities, targets)["macro_f1"] == report.f1.mean().item()


def test_a_class_that_is_neither_there_nor_said_has_no_f1():
    report = ClassReport.of(torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]]), torch.tensor([0, 1]))
    assert report.f1.tolist() == [1.0, 1.0, 0.0]
    assert report.calibration_error == pytest.approx(0.15)


def test_tables_that_nobody_reads_are_left_out():
    assert Classification(num_classes=50).has_details
    assert not Classification(num_classes=51).has_details
