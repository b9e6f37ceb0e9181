"""The recall task: its definition in both forms, and that attention solves it."""

import numpy as np
import pytest

from klformer.errors import ArgumentError
from klformer.lab.data.sequences import IGNORED
from klformer.lab.runs.compare import check_model
from klformer.lab.runs.config import ExperimentConfig, preset
from klformer.lab.runs.train import train_run
from klformer.lab.tasks import Recall, recall
from klformer.lab.tasks.recall import RecallData
from klformer.lab.training.progress import SilentReporter
from klformer.models import AttentionSpec

SIZES = {"num_pairs": 5, "num_symbols": 11, "num_queries": 3}


def task(**config):
    return Recall(RecallData(**{"num_examples": 700, **SIZES, **config}), quiet=True)


def solved(inputs, symbols):
    """Values of the keys that are asked for, from the pairs (one-hot key, one-hot value) of one sequence."""
    keys, values = inputs[:, :symbols], inputs[:, symbols:]
    whole = values.any(-1)
    table = dict(zip(keys[whole].argmax(-1).tolist(), values[whole].argmax(-1).tolist(), strict=True))
    asked = keys.any(-1) & ~whole
    return [table[key] if ask else IGNORED for key, ask in zip(keys.argmax(-1).tolist(), asked, strict=True)]


@pytest.mark.parametrize("length", [8, 13])
def test_pairs(length):
    made = task(max_len=length)
    examples = made.load("train")
    assert made.input_dim == examples.first.width == 22
    assert examples.targets.shape == (700, length)
    for inputs, targets in zip(examples.first, examples.targets, strict=True):
        assert solved(inputs, 11) == targets.tolist()
        assert (targets != IGNORED).sum() == 3
        assert len(np.unique(inputs[:5, :11].argmax(-1))) == 5


@pytest.mark.parametrize("length", [13, 17])
def test_causal(length):
    made = task(form="causal", max_len=length)
    examples = made.load("train")
    assert (made.vocab_size, made.input_dim, made.is_causal) == (23, None, True)
    for tokens, targets in zip(examples.first, examples.targets, strict=True):
        keys, values = tokens[:10:2], tokens[1:10:2]
        assert keys.max() < 11
        assert (values >= 11).all()
        table = dict(zip(keys.tolist(), (values - 11).tolist(), strict=True))
        assert len(table) == 5
        assert (targets[:10] == IGNORED).all()
        assert [table.get(token, IGNORED) for token in tokens[10:].tolist()] == targets[10:].tolist()
        assert (tokens == 22).sum() == length - 13


def test_mqar():
    made = task(form="mqar", max_len=25)
    examples = made.load("train")
    assert (made.vocab_size, made.input_dim, made.is_causal) == (23, None, True)
    for tokens, targets in zip(examples.first, examples.targets, strict=True):
        keys, values = tokens[:10:2], tokens[1:10:2]
        assert keys.max() < 11 <= values.min() <= values.max() < 22
        assert len(set(keys.tolist())) == len(set(values.tolist())) == 5
        table = dict(zip(keys.tolist(), (values - 11).tolist(), strict=True))
        (places,) = np.nonzero(targets != IGNORED)
        assert len(places) == 3
        assert (places >= 10).all()
        assert (places % 2 == 0).all()
        assert [table[key] for key in tokens[places].tolist()] == targets[places].tolist()
    # No position is blank, and between the queries every token occurs.
    assert set(np.concatenate(list(examples.first)).tolist()) == set(range(22))


def test_the_first_query_of_mqar_has_zoologys_gaps():
    examples = task(form="mqar", num_queries=1, num_examples=6000, max_len=30).load("train")
    places = (examples.targets != IGNORED).argmax(1)
    expected = np.arange(1, 11) ** (0.01 - 1)
    expected *= 6000 / expected.sum()
    counts = np.bincount((places - 10) // 2, minlength=10)
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected)).all()


def test_symbols_places_and_questions_are_uniform():
    examples = task(num_examples=6000, max_len=12).load("train")
    vectors = examples.first.values.reshape(6000, 12, 22)
    for counts, total in (
        (vectors[:, :5, :11].sum((0, 1)), 6000 * 5),
        (vectors[:, :5, 11:].sum((0, 1)), 6000 * 5),
        ((examples.targets[:, 5:] != IGNORED).sum(0), 6000 * 3),
    ):
        share = 1 / len(counts)
        assert (np.abs(counts - total * share) <= 4 * (total * share * (1 - share)) ** 0.5).all()


def test_parts_and_seeds_are_different_data():
    def rows(split, **config):
        return {row.tobytes() for row in task(**config).load(split).first}

    everything = [rows("train"), rows("validation"), rows("test"), rows("train", seed=1)]
    assert rows("train") == everything[0]
    assert sum(map(len, everything)) == len(set().union(*everything)) == 700 + 1000 + 1000 + 700


def test_names_tell_the_settings_apart():
    assert Recall(RecallData()).label() == "Recall"
    assert task().label() == "Recall 5 of 11 queries 3"
    assert task(form="causal").label() == "Recall causal 5 of 11 queries 3"
    assert task(form="mqar").label() == "Recall mqar 5 of 11 queries 3"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_pairs": 12}, "num_pairs must be at most num_symbols=11"),
        ({"num_queries": 6}, "num_queries must be at most num_pairs=5"),
        ({"max_len": 7}, "max_len must be at least 8, for 5 pairs and 3 queries in the form 'pairs', got 7"),
        ({"form": "causal", "max_len": 12}, "max_len must be at least 13"),
        ({"form": "mqar", "max_len": 15}, "max_len must be at least 16"),
    ],
)
def test_what_does_not_fit_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        task(**config)


def config(attention="softmax", *, data=None, **training):
    whole = preset("laptop", "recall", AttentionSpec.parse(attention)).model_dump()
    whole["data"] |= {"num_examples": 2000, "num_pairs": 4, "num_queries": 4, "num_symbols": 8, **(data or {})}
    whole["training"] |= training
    return ExperimentConfig.model_validate(whole)


def test_one_layer_of_attention_solves_it(tmp_path):
    result = train_run(config(max_steps=150), tmp_path / "run", resume=False, reporter=SilentReporter())
    assert result["test"]["accuracy"] > 0.97
    assert 0.9 < result["test"]["all_right"] <= result["test"]["accuracy"]


def test_the_causal_form_trains_with_draws(tmp_path):
    causal = config("gmm-prf:num_frequencies=8", data={"form": "causal", "max_len": 15}, max_steps=4)
    result = train_run(causal, tmp_path / "run", resume=False, reporter=SilentReporter())
    assert result["test"]["draws"] == 10
    assert {"voting_accuracy", "all_right"} <= result["test"].keys()


def test_an_attention_without_a_causal_form_is_refused():
    with pytest.raises(ArgumentError, match="causal"):
        check_model(config("linformer", data={"form": "causal"}))


def test_blocks_of_numbers_give_the_same_sequences(monkeypatch):
    """Multi-query recall as others pose it: 64 pairs in 512 tokens, all asked for, of a large vocabulary."""
    config = RecallData(form="causal", num_pairs=64, num_queries=64, num_symbols=501, max_len=512)
    at_once = recall.generate(np.random.default_rng(0), 7, config, 512)
    monkeypatch.setattr(recall, "_BLOCK", 600)
    in_blocks = recall.generate(np.random.default_rng(0), 7, config, 512)
    assert all(np.array_equal(one, other) for one, other in zip(at_once, in_blocks, strict=True))
    keys, _, targets = at_once
    assert (targets >= 0).sum() == 7 * 64
    assert all(len(np.unique(row[row >= 0])) == 64 for row in keys)
