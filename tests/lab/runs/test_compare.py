"""Comparisons see what is impossible before the first run, and train side by side; the rest is typed in tests/cli."""

import json
import multiprocessing
import signal

import pytest
from cli_support import fails, run
from run_support import Listener, assert_same_state, final_state, tiny
from support import TINY

import klformer
from klformer.errors import ArgumentError, Interrupted, RunError
from klformer.lab.runs.compare import check_model, compare
from klformer.lab.runs.config import preset
from klformer.lab.runs.naming import run_name
from klformer.lab.runs.rates import best_rate, choice
from klformer.lab.runs.sweep import Variant, variants
from klformer.lab.training.progress import SilentReporter
from klformer.models import AttentionSpec


@pytest.mark.parametrize("name", klformer.attention_names())
def test_every_model_can_be_checked_without_its_memory(name):
    check_model(preset("paper", "listops", AttentionSpec(name=name)))


def test_an_impossible_model_is_named():
    with pytest.raises(ValueError, match="multiple of num_components=2, got 7"):
        check_model(preset("paper", "listops", AttentionSpec.parse("gmm-rks:num_frequencies=7")))


def two_runs(tmp_path, **training):
    return [tiny(tmp_path, attention, **training) for attention in ("gmm-rks:num_frequencies=8", "linear-elu")]


class Interrupting(Listener):
    """Sends SIGTERM to this process at the first validation."""

    def say(self, message):
        super().say(message)
        if message.startswith("step 25: validation") and sum("validation" in said for said in self.said) == 1:
            signal.raise_signal(signal.SIGTERM)


def test_runs_side_by_side_stop_together_go_on_and_are_the_runs_one_after_the_other(tmp_path):
    configs, out = (
        two_runs(tmp_path, max_steps=100, evaluate_every=25, checkpoint_every=25, log_every=25),
        tmp_path / "out",
    )
    listener, labels = Interrupting(), []

    def labelled(label):
        labels.append(label)
        return listener

    with pytest.raises(Interrupted, match="SIGTERM: 0 of 2 runs are done, the others are saved"):
        compare([Variant(config) for config in configs], out, reporter=listener, jobs=2, labelled=labelled)
    assert labels == ["[1/2]", "[2/2]"]
    ends = ("stopped after step", "ended before", "interrupted before")  # whichever a slow machine has come to
    assert sum(any(end in said for end in ends) for said in listener.said) == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not multiprocessing.active_children()
    results = compare([Variant(config) for config in configs], out, reporter=SilentReporter(), jobs=2)
    straight = compare([Variant(config) for config in configs], tmp_path / "straight", reporter=SilentReporter())
    for config, side_by_side, alone in zip(configs, results, straight, strict=True):
        assert side_by_side["test"] == alone["test"]
        name = run_name(config)
        assert_same_state(final_state(out / name), final_state(tmp_path / "straight" / name))
    assert compare([Variant(config) for config in configs], out, reporter=listener, jobs=2) == results
    assert listener.said[-1] == "2 of 2 runs are done already"


def test_a_run_that_fails_is_named_and_the_others_are_saved(tmp_path):
    configs = two_runs(tmp_path, max_steps=100_000)
    (tmp_path / run_name(configs[1])).write_text("in the way")
    with pytest.raises(RunError, match=r"linear-elu-seed0: can't write to"):
        compare([Variant(config) for config in configs], tmp_path, reporter=SilentReporter(), jobs=2)
    assert not multiprocessing.active_children()


def test_a_sweep_names_its_runs_and_has_one_row_each(home, capsys):
    arguments = ["compare", "--attentions", "gmm-rks", "softmax", *TINY]
    out = run(capsys, *arguments, "--sweep", "model.dropout=0,0.1", "training.batch-size=8,16")
    assert out.count("[8/8] ") == 1
    names = {path.parent.name for path in (home / "runs").glob("*/result.json")}
    assert "sparsity0.5-laptop-softmax-seed0-model.dropout=0.1-training.batch_size=8" in names
    assert len(names) == 8
    file = home / "runs" / "comparison-sparsity0.5-laptop-model.dropout-training.batch_size.json"
    assert {result["variant"] for result in json.loads(file.read_text())} == {
        f"model.dropout={dropout} training.batch_size={size}" for dropout in ("0", "0.1") for size in (8, 16)
    }
    assert out[out.index("on the test set") :].count("model.dropout=0.1") == 4
    run(capsys, *arguments)
    error = fails(capsys, 1, *arguments, "--model.dropout", "0.3")
    assert "another configuration: model.dropout was" in error
    assert "`compare --sweep FIELD=A,B` makes one for every value" in error


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("model.dropout", "a sweep looks like model.dropout=0,0.1,0.3, got 'model.dropout'"),
        ("model.dropuot=0,1", "no field 'model.dropuot' to sweep over; did you mean 'model.dropout'?"),
        ("optimiser.lr=0.1", "no field 'optimiser.lr' to sweep over; did you mean 'optimiser.learning_rate'?"),
        ("model.dropout=2", r"sweep .*model.dropout"),
        ("seed=1,2", "seeds are given by --seeds"),
    ],
)
def test_a_sweep_that_is_not_one_is_refused(tmp_path, sweep, message):
    with pytest.raises(ArgumentError, match=message):
        variants(tiny(tmp_path), [sweep])


def test_options_of_an_attention_are_swept_too(tmp_path):
    found = variants(tiny(tmp_path), ["attention.num_frequencies=4,8"])
    assert [variant.config.attention.options["num_frequencies"] for variant in found] == [4, 8]
    assert variants(tiny(tmp_path), []) == [Variant(tiny(tmp_path))]


def test_every_attention_takes_the_learning_rate_that_is_best_on_validation(home, capsys):
    arguments = ["compare", "--attentions", "gmm-rks", "softmax", "--seeds", "0", "1", *TINY]
    out = run(capsys, *arguments, "--learning-rates", "1e-9", "1e-3")
    runs = home / "runs"
    results = {path.parent.name: json.loads(path.read_text()) for path in runs.glob("*/result.json")}
    chosen = json.loads((runs / "comparison-sparsity0.5-laptop.json").read_text())
    assert [(result["attention"].partition(":")[0], result["seed"]) for result in chosen] == [
        ("gmm-rks", 0), ("softmax", 0), ("gmm-rks", 1), ("softmax", 1),
    ]  # fmt: skip
    for attention in ("gmm-rks", "softmax"):
        name = f"sparsity0.5-laptop-{attention}-seed%d-optimiser.learning_rate=%s"
        rates = {rate: results[name % (0, rate)]["validation"]["accuracy"] for rate in ("1e-09", "0.001")}
        best = max(rates, key=lambda rate: (rates[rate], float(rate)))
        [other] = set(rates) - {best}
        assert name % (1, best) in results
        assert name % (1, other) not in results
        assert {result["variant"] for result in chosen if result["attention"].startswith(attention)} == {
            f"optimiser.learning_rate={best}"
        }
    assert "on the test set" in out
    assert len(results) == 6
    assert run(capsys, *arguments, "--learning-rates", "1e-9", "1e-3").count("done already") == 4 + 4
    evidence = run(capsys, "analyze", "evidence", "runs", "--out", "analysis")
    assert "2 runs with learning rates that are not the best on validation are left out" in " ".join(evidence.split())
    rows = json.loads((home / "analysis" / "runs.json").read_text())["rows"]
    assert {(row["attention"].partition(":")[0], row["seed"]) for row in rows} == {
        (attention, seed) for attention in ("gmm-rks", "softmax") for seed in (0, 1)
    }
    assert {row["learning_rate"] for row in rows} <= {1e-9, 1e-3}
    spectra = run(capsys, "analyze", "eigenvalues", "runs", "--out", "analysis", "--quick")
    assert "2 runs with learning rates that are not the best on validation are left out" in " ".join(spectra.split())
    analysed = {row["run"] for row in json.loads((home / "analysis" / "eigenvalues.json").read_text())["rows"]}
    assert analysed == {result["name"] for result in chosen if result["attention"].startswith("gmm-rks")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rates", "1e-3", "1e-3"], "learning rates must be positive, each once, got 0.001 0.001"),
        (["--learning-rates", "0", "1e-3"], "learning rates must be positive"),
        (["--learning-rates", "1e-3", "--sweep", "model.dropout=0,1"], "--learning-rates chooses and --sweep does not"),
    ],
)
def test_learning_rates_that_can_not_be_tried_are_refused(home, capsys, arguments, message):
    assert message in fails(capsys, 2, "compare", "--attentions", "softmax", *TINY, *arguments)
    assert not (home / "runs").exists()


def test_runs_that_differ_in_more_than_the_learning_rate_are_not_chosen_from(home, capsys):
    run(capsys, "compare", "--attentions", "softmax", *TINY, "--learning-rates", "1e-4", "1e-3")
    run(
        capsys,
        "compare",
        "--attentions",
        "softmax",
        *TINY,
        "--optimiser.learning-rate",
        "0.5",
        "--model.dropout",
        "0.3",
    )
    run(capsys, "analyze", "evidence", "runs")
    rows = json.loads((home / "analysis" / "runs.json").read_text())["rows"]
    rates = {row["setting"].partition(":")[0].partition(" ")[2]: row["learning_rate"] for row in rows}
    assert len(rows) == len(rates) == 2
    assert rates["model.dropout=0.0"] in (1e-4, 1e-3)
    assert rates["model.dropout=0.3"] == 0.5


def test_a_rate_whose_validation_is_no_number_is_not_chosen():
    known = {"metric": "accuracy", "metric_higher_is_better": True, "metric_percent": True}
    accuracies = {0.02: None, 0.01: float("nan"), 1e-3: 0.1}
    results = {rate: known | {"validation": {"accuracy": value}} for rate, value in accuracies.items()}
    assert best_rate(results) == 1e-3
    assert best_rate(dict(reversed(results.items()))) == 1e-3
    assert choice([(1, 0.1, 5.0), (0, 0.3, 1.0), (0, 0.2, 2.0), (1, 0.3, 9.0)]) == (0.2, [0.2, 0.3])
    assert choice([(0, 0.1, 5.0), (1, 0.2, 5.0)]) is None
