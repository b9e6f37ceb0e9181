"""Milestones: noted once, kept where asked for, and carried through checkpoints."""

import pytest

from klformer.lab.training.callbacks import Callback, Milestones, Validation
from klformer.lab.training.evaluation import Evaluation
from klformer.lab.training.metrics import Metric

ACCURACY = Metric("accuracy", higher_is_better=True, percent=True)


def validate(callback, step, accuracy, kept):
    found = Evaluation(10, 1.0, {"accuracy": (accuracy,)}, {"accuracy": accuracy}, "voting")
    callback.after_validation(Validation(step, found, lambda *what: kept.append(what)))


def test_milestones_are_noted_once_and_some_keep_the_weights():
    kept, milestones = [], Milestones(ACCURACY, keep_weights=True)
    for step, accuracy in [(1, 0.05), (2, 0.32), (3, 0.1), (4, 0.41)]:
        validate(milestones, step, accuracy, kept)
    assert milestones.result() == {"first_reached": {"10": 2, "20": 2, "30": 2, "40": 4}}
    assert kept == [("reached20", 2, {"validation_accuracy": 0.32}), ("reached40", 4, {"validation_accuracy": 0.41})]
    assert set(milestones.checkpoint_kinds) == {"reached20", "reached40", "reached60", "reached80"}


def test_a_resumed_run_does_not_note_them_again():
    kept, before, after = [], Milestones(ACCURACY, keep_weights=True), Milestones(ACCURACY, keep_weights=True)
    validate(before, 2, 0.32, [])
    after.load(before.state())
    validate(after, 3, 0.35, kept)
    assert after.result() == before.result()
    assert kept == []


def test_weights_are_kept_where_asked_for():
    kept, milestones = [], Milestones(ACCURACY, keep_weights=False)
    validate(milestones, 2, 0.9, kept)
    assert kept == []
    assert len(milestones.first_reached) == 9


def test_an_error_has_no_milestones():
    with pytest.raises(ValueError, match="a share of which more is better, which mse is not"):
        Milestones(Metric("mse", higher_is_better=False), keep_weights=False)


def test_a_callback_does_nothing_by_itself():
    class Nothing(Callback):
        name = "nothing"

    validate(Nothing(), 1, 0.5, [])
    assert (Nothing().state(), Nothing().result(), Nothing().checkpoint_kinds) == ({}, {}, ())
