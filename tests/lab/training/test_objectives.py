"""Objectives: losses, metrics and combinations against values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from klformer.lab.data import Examples, Sequences, collate
from klformer.lab.data.sequences import IGNORED
from klformer.lab.training.config import TrainingConfig
from klformer.lab.training.evaluation import evaluate
from klformer.lab.training.metrics import Metric
from klformer.lab.training.objective import Objective
from klformer.lab.training.objectives import Classification, PositionClassification, Regression, cross_entropy
from klformer.lab.training.objectives.scored import Correlation, ranks
from klformer.lab.training.signals import StopSignal
from klformer.lab.training.step import CheckpointClock, Stepper


def examples(targets):
    rows = np.arange(3 * len(targets)).reshape(-1, 3) % 5
    return Examples(Sequences.from_matrix(rows), np.asarray(targets))


class Scores(torch.nn.Module):
    """Outputs that are a table's rows at the first token."""

    def __init__(self, width):
        super().__init__()
        self.table = torch.nn.Embedding(5, width)

    def forward(self, inputs, key_mask):
        return self.table(inputs[:, 0])


def test_metrics_know_their_direction():
    accuracy, mse = Metric("accuracy", higher_is_better=True, percent=True), Metric("mse", higher_is_better=False)
    assert accuracy.reaches(0.5, 0.5)
    assert not accuracy.reaches(0.4, 0.5)
    assert mse.reaches(0.4, 0.5)
    assert not mse.reaches(0.6, 0.5)
    assert sorted([3.0, 1.0, 2.0], key=mse.rank) == [3.0, 2.0, 1.0]
    assert (accuracy.show(0.12345), accuracy.show(0.12345, digits=1), mse.show(0.12345)) == (
        "12.35%",
        "12.3%",
        "0.1235",
    )


def test_a_metric_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"metric must be one of 'accuracy', got 'acuracy'; did you mean 'accuracy'"):
        Classification(num_classes=2).metric("acuracy")


def test_cross_entropy_is_a_sum_over_examples_for_one_draw_and_for_several():
    scores, labels = torch.randn(4, 7, 5), torch.randint(0, 5, (7,))
    expected = -scores.log_softmax(-1).gather(-1, labels.expand(4, -1)[..., None]).sum((1, 2))
    torch.testing.assert_close(cross_entropy(scores, labels), expected)
    torch.testing.assert_close(cross_entropy(scores[1], labels), expected[1])


def test_classification():
    objective, batch = Classification(num_classes=5), collate(examples([0, 1, 2]), np.arange(3))
    outputs = torch.eye(5)[[0, 1, 4]]
    assert objective.num_outputs == 5
    assert objective.count(outputs, batch) == 3
    assert objective.sums(outputs, batch) == {"accuracy": 2}
    predictions = objective.predict(outputs[None], batch)
    assert predictions.tolist() == [[0, 1, 4]]
    assert objective.measure(predictions[0], batch.targets)["accuracy"] == pytest.approx(2 / 3)
    assert objective.combine(torch.tensor([[0, 1], [3, 1], [3, 2]])).tolist() == [3, 1]


def test_regression():
    objective, batch = Regression(), collate(examples([1.0, 2.0, 6.0]), np.arange(3))
    outputs = torch.tensor([[1.0], [4.0], [5.0]])
    assert batch.targets.dtype == torch.float32
    assert objective.loss_of(outputs, batch) == 5
    assert objective.loss_of(torch.stack([outputs, outputs + 1]), batch).tolist() == [5, 1 + 9 + 0]
    assert objective.sums(outputs, batch) == {"mse": 5, "mae": 3}
    measured = objective.measure(objective.predict(outputs, batch), batch.targets)
    assert measured == pytest.approx({"mse": 5 / 3, "mae": 1.0, "r2": 1 - 5 / 14})
    assert objective.measure(torch.ones(2), torch.ones(2)) == {"mse": 0.0, "mae": 0.0, "r2": 0.0}
    assert objective.combine(torch.tensor([[1.0, 2.0], [3.0, 2.0]])).tolist() == [2, 2]
    assert objective.selecting == Metric("mse", higher_is_better=False)


def positions(targets, lengths=(3, 2)):
    rows = [np.arange(length) for length in lengths]
    return Examples(Sequences.from_list(rows), np.asarray(targets))


def test_classes_of_positions():
    objective = PositionClassification(num_classes=5, max_len=4)
    data = positions([[1, IGNORED, 2, IGNORED], [IGNORED, 4, IGNORED, IGNORED]])
    batch = collate(data, np.arange(2))
    assert batch.targets.tolist() == [[1, IGNORED, 2], [IGNORED, 4, IGNORED]]
    scores = torch.randn(3, 2, 3, 5)
    logs = scores.log_softmax(-1)
    expected = -(logs[:, 0, 0, 1] + logs[:, 0, 2, 2] + logs[:, 1, 1, 4])
    torch.testing.assert_close(objective.loss_of(scores, batch), expected)
    torch.testing.assert_close(objective.loss_of(scores[1], batch), expected[1])
    assert objective.count(scores, batch) == 3
    right = torch.eye(5)[torch.tensor([[1, 0, 3], [0, 4, 0]])]
    assert objective.sums(right, batch) == {"accuracy": 2}
    predictions = objective.predict(right[None], batch)
    assert predictions.shape == (1, 2, *objective.prediction_shape)
    measured = objective.measure(predictions[0], torch.from_numpy(data.targets))
    assert measured == pytest.approx({"accuracy": 2 / 3, "all_right": 1 / 2})
    votes = torch.tensor([[[0, 3]], [[2, 1]], [[2, 4]], [[0, 1]]])
    assert objective.combine(votes).tolist() == [[0, 1]]


def test_targets_of_positions_are_padded_with_the_inputs():
    data = positions([[1, 2, 3], [4, 0, IGNORED]])
    assert collate(data, np.array([1])).targets.tolist() == [[4, 0]]
    assert collate(data, np.arange(2), pad_to=5).targets.tolist() == [
        [1, 2, 3, IGNORED, IGNORED],
        [4, 0, IGNORED, IGNORED, IGNORED],
    ]


@pytest.mark.parametrize(
    ("objective", "targets", "message"),
    [
        (Classification(num_classes=4), [0, 4], r"int64 from 0 to 3, got torch\.int64 from 0 to 4"),
        (Classification(num_classes=4), [0.0], r"got torch\.float32"),
        (PositionClassification(num_classes=4, max_len=2), [0, 1], r"int64 \(N, length\), got torch\.int64 \(2,\)"),
        (PositionClassification(num_classes=4, max_len=2), [[IGNORED, IGNORED]], "must ask for something"),
        (PositionClassification(num_classes=4, max_len=2), [[IGNORED, 4]], "from 0 to 3, or -100 .* got 4 to 4"),
        (Regression(), [1], r"finite floats, got torch\.int64"),
        (Regression(), [math.nan], "finite floats"),
    ],
)
def test_targets_of_another_kind_are_refused(objective, targets, message):
    with pytest.raises(ValueError, match=message):
        objective.check_targets(torch.tensor(targets))


def test_evaluation_gathers_the_predictions_of_all_batches():
    objective, model, data = Regression(), Scores(1), examples(np.linspace(-1, 1, 11))
    result = evaluate(model, data, objective=objective, accelerator=Accelerator(cpu=True), batch_size=4)
    outputs = model(torch.from_numpy(data.first.values.reshape(11, 3).astype(np.int64)), None)[:, 0].detach()
    expected = objective.measure(outputs, torch.from_numpy(data.targets))
    assert result.means() == pytest.approx(expected)
    assert result.loss == pytest.approx(expected["mse"])
    content = result.as_dict()
    assert (content["num_examples"], content["draws"], content["mse_std"]) == (11, 1, 0.0)
    assert content["mse_by_draw"] == [content["mse"]]
    assert content["combined_mse"] == pytest.approx(content["mse"])
    assert content["r2"] == pytest.approx(expected["r2"])


class Tokens(Classification):
    """As a masked language model would: the loss counts two tokens of every example."""

    def loss_of(self, outputs, batch):
        return 2 * super().loss_of(outputs, batch)

    def count(self, outputs, batch):
        return 2 * len(batch)

    def sums(self, outputs, batch):
        return {}


def updated(objective, accumulation):
    """The weights after one step of plain descent."""
    torch.manual_seed(0)
    model = Scores(5)
    stepper = Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        examples([0, 1, 2, 3, 4, 0, 1]),
        objective=objective,
        training=TrainingConfig(max_steps=1, accumulation=accumulation),
        accelerator=Accelerator(cpu=True),
        signal=StopSignal(),
        clock=CheckpointClock(None),
    )
    return stepper.step(np.arange(7), (0, 1)), model.table.weight.detach()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_is_of_the_mean_over_what_the_loss_counts(accumulation):
    plain, expected = updated(Classification(num_classes=5), accumulation)
    tokens, weights = updated(Tokens(num_classes=5), accumulation)
    torch.testing.assert_close(weights, expected)
    assert (plain.count, tokens.count) == (7, 14)
    assert tokens.loss == pytest.approx(2 * plain.loss)
    assert plain.metrics.keys() == {"accuracy"}
    assert tokens.metrics == {}, "what is no mean is not shown while training"


def test_an_objective_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Objective()


def test_rank_correlation_keeps_its_sign_with_many_equal_targets():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(100_000, generator=generator)
    targets = (scores + torch.randn(100_000, generator=generator) > 0).float()
    assert 0.55 < Correlation().measure(scores, targets)["spearman"] < 0.6


def test_ranks_of_equal_numbers_are_their_mean():
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 2.0, 3.0])).tolist() == [4, 1, 4, 2, 4]
