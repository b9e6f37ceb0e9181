"""Learned against frozen: pairs, their differences and standard errors, and the answer that follows from them."""

import json

import pytest
from run_support import tiny

from klformer.analysis.evidence import recommend as recommending
from klformer.analysis.evidence.chart import draw
from klformer.analysis.evidence.command import EvidenceAnalysis, markdown, run
from klformer.analysis.evidence.measure import comparisons, measured
from klformer.analysis.evidence.recommend import Needs, recommend, relative_work
from klformer.errors import ArgumentError
from klformer.runs.train import train_run
from klformer.training.progress import SilentReporter


def numbers(attention, values, setting="task"):
    return [measured({"attention": attention, "seed": seed}, setting, value) for seed, value in values.items()]


def test_pairs_are_of_one_seed_and_one_way_of_drawing():
    found = comparisons(
        [
            *numbers("gmm-rks", {0: 10.0, 1: 20.0, 2: 30.0, 7: 20.0}),
            *numbers("gmm-rks:frozen=true", {2: 24.0, 0: 8.0, 1: 16.0}),
            *numbers("gmm-rks:frozen=true,redraw=false", {0: 1.0}),
            *numbers("softmax", {0: 5.0}),
        ]
    )
    redrawn, kept, softmax = (comparison.as_row() for comparison in found)
    assert (redrawn["attention"], redrawn["draw"], kept["draw"], softmax["draw"]) == (
        "gmm-rks",
        "redrawn",
        "kept",
        "none",
    )
    assert (redrawn["pairs"], redrawn["difference"], redrawn["frozen"]) == (3, 4.0, 16.0)
    assert redrawn["standard_error"] == pytest.approx(2 / 3**0.5)
    assert (kept["learned"], kept["difference"], kept["standard_error"]) == (None, None, None)
    assert softmax["frozen"] is None
    table = markdown([redrawn, kept, softmax])
    assert "| `gmm-rks` | redrawn | 4 | 20.00 +- 8.16 | 16.00 +- 8.00 | **+4.00 +- 1.15** |" in table


def test_evidence_of_runs(tmp_path, capsys):
    for attention in ("gmm-rks:num_frequencies=8", "gmm-rks:num_frequencies=8,frozen=true"):
        folder = tmp_path / "runs" / attention
        train_run(tiny(tmp_path, attention, max_steps=1), folder, resume=False, reporter=SilentReporter())
    run(EvidenceAnalysis(runs=(tmp_path / "runs",), out=tmp_path / "out"))
    (row,) = json.loads((tmp_path / "out" / "evidence.json").read_text())["rows"]
    assert (row["attention"], row["pairs"]) == ("gmm-rks:num_frequencies=8", 1)
    assert row["difference"] == pytest.approx(row["learned"] - row["frozen"])
    assert "evidence.json" in capsys.readouterr().out
    learned, frozen = json.loads((tmp_path / "out" / "runs.json").read_text())["rows"]
    assert (learned["attention"], frozen["attention"]) == (row["attention"], "gmm-rks:frozen=true,num_frequencies=8")
    assert (learned["value"], frozen["value"]) == (row["learned"], row["frozen"])
    assert learned["steps"] == 1
    assert (tmp_path / "out" / "evidence.png").stat().st_size > 10_000
    with pytest.raises(ArgumentError, match="no finished run"):
        run(EvidenceAnalysis(runs=(tmp_path / "nothing",)))


def test_every_setting_has_a_panel_with_its_attentions():
    found = [
        *numbers("gmm-rks", {0: 1.0, 1: 3.0}),
        *numbers("gmm-rks:frozen=true", {0: 0.5}),
        *numbers("softmax", {0: 9.0}),
    ]
    found += numbers("gmm-rks:frozen=true,redraw=false", {0: 2.0}, setting="other: accuracy, %")
    figure = draw([comparison.as_row() for comparison in comparisons(found)])
    first, second = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["gmm-rks", "softmax"]
    assert (second.get_title(loc="left"), second.get_xlabel()) == ("other", "accuracy, %")
    assert [label.get_text() for label in second.get_yticklabels()] == ["gmm-rks, kept"]


@pytest.fixture
def evidence(monkeypatch):
    values = {"softmax": 100.0, "linear-elu": 90.0, "gmm-prf": 99.5, "gmm-rks": 99.4, "gmm-prf:redraw=false": 95.0}
    found = [number for name, value in values.items() for number in numbers(name, {0: value}, recommending._SETTING)]
    rows = [comparison.as_row() for comparison in comparisons(found)]
    facts = {"processor": "a machine", "date": "2026-11-17T00:00:00"}
    monkeypatch.setattr(recommending, "measurements", lambda: {"rows": rows, "environment": facts})


@pytest.mark.parametrize(
    ("needs", "attention"),
    [
        (Needs(length=64), "softmax"),
        (Needs(length=16_384), "gmm-prf"),
        (Needs(length=16_384, deterministic=True), "softmax"),
        (Needs(length=16_384, deterministic=True, budget=0.5), "gmm-prf:redraw=false"),
        (Needs(length=16_384, budget=0.01), "linear-elu"),
        (Needs(length=128, budget=1e-6), "linear-elu"),
    ],
)
def test_the_answer_fits_the_needs(evidence, needs, attention):
    answer = recommend(needs)
    assert answer.attention == attention
    assert answer.reasons


def test_work_is_counted_in_multiplications():
    assert relative_work("softmax", 10, 8) == 1
    # D = 8, R = 16: 2 R D + 2 F E = 256 + 256 for PRF and 256 + 512 for RKS, softmax 2 L D = 1600.
    assert relative_work("gmm-prf", 100, 8) == pytest.approx(512 / 1600)
    assert relative_work("gmm-rks", 100, 8) == pytest.approx(768 / 1600)


def test_the_package_has_measurements():
    answer = recommend(Needs(length=4096))
    assert {"softmax", "linear-elu"} <= {row["attention"] for row in answer.candidates}
