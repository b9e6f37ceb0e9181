"""Learned against frozen: pairs, their differences and standard errors, and the answer that follows from them."""

import json
import math
import re
from pathlib import Path

import pytest
from cli_support import run as cli
from run_support import tiny

import klformer
from klformer.attention import AttentionSpec
from klformer.errors import ArgumentError
from klformer.lab.analysis import recommend as recommending
from klformer.lab.analysis.evidence.chart import draw
from klformer.lab.analysis.evidence.command import EvidenceAnalysis, markdown, run
from klformer.lab.analysis.evidence.measure import comparisons, measured
from klformer.lab.analysis.recommend import Needs, recommend, relative_time, relative_work
from klformer.lab.runs.config import ExperimentConfig, preset
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.naming import setting_name
from klformer.lab.runs.train import train_run
from klformer.lab.training.progress import SilentReporter
from research.evidence.tables import gains
from research.pretraining.command import PretrainingAnalysis
from research.pretraining.command import run as analyse_pretraining


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
    assert "| `gmm-rks` | redrawn | 4 | 20.00 +- 4.08 | 16.00 +- 4.62 | **+4.00 +- 1.15** |" in table


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
    curve = json.loads((tmp_path / "out" / "runs-curves.json").read_text())["rows"]
    assert [(point["attention"], point["seed"], point["step"]) for point in curve] == [
        (learned["attention"], 0, 1),
        (frozen["attention"], 0, 1),
    ]
    (validation,) = RunFolder(tmp_path / "runs" / "gmm-rks:num_frequencies=8").metrics("validation")
    assert curve[0]["value"] == pytest.approx(100 * validation["accuracy"])
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
    (horizontal,) = [lines for bars in first.containers[2:] for lines in bars.lines[2]]
    assert [segment[:, 0].tolist() for segment in horizontal.get_segments()] == [[1.0, 3.0]]  # 2 +- sqrt(2) / sqrt(2)
    assert [label.get_text() for label in first.get_yticklabels()] == ["gmm-rks", "softmax"]
    assert (second.get_title(loc="left"), second.get_xlabel()) == ("other", "accuracy, %")
    assert [label.get_text() for label in second.get_yticklabels()] == ["gmm-rks, kept"]


@pytest.mark.parametrize(
    ("task", "data", "setting"),
    [
        ("recall", {}, "recall-laptop"),
        ("recall", {"max_len": 20}, "recall-laptop"),
        ("recall", {"num_pairs": 32}, "recall32-of-64-laptop"),
        ("recall", {"num_queries": 2}, "recall-queries-2-laptop"),
        ("recall", {"max_len": 40}, "recall-length-40-laptop"),
        (
            "recall",
            {"form": "causal", "num_pairs": 8, "num_queries": 8, "max_len": 32},
            "recall-causal-8-of-64-queries-8-length-32-laptop",
        ),
        ("planted", {}, "planted-periodic-laptop"),
        ("planted", {"kernel": "mixture", "dim": 4, "max_len": 32}, "planted-mixture-laptop"),
        ("planted", {"dim": 8}, "planted-periodic-dim-8-laptop"),
        ("planted", {"max_len": 64}, "planted-periodic-length-64-laptop"),
    ],
)
def test_data_of_another_kind_is_another_setting(task, data, setting):
    whole = preset("laptop", task, AttentionSpec(name="softmax")).model_dump()
    whole["data"] |= data
    assert setting_name(ExperimentConfig.model_validate(whole)) == setting


def test_two_runs_that_cannot_be_told_apart_are_refused(tmp_path):
    folders = [tmp_path / "runs" / name for name in ("a", "b")]
    for folder in folders:
        attention = "gmm-rks:num_frequencies=8,frozen=true"
        train_run(tiny(tmp_path, attention, max_steps=1), folder, resume=False, reporter=SilentReporter())
    message = (
        "runs/a and .*runs/b can't be told apart: both are gmm-rks:num_frequencies=8, frozen, of seed 0 in sparsity"
    )
    with pytest.raises(ArgumentError, match=message):
        run(EvidenceAnalysis(runs=(tmp_path / "runs",), out=tmp_path / "out"))
    run(EvidenceAnalysis(runs=(folders[0], folders[0]), out=tmp_path / "out"))  # one run, named twice


def test_runs_of_a_sweep_are_settings_of_their_own(tmp_path):
    for every in (10, 1):
        config = tiny(tmp_path, "gmm-rks:num_frequencies=8", max_steps=1, resample_every=every, log_every=every)
        train_run(config, tmp_path / "runs" / str(every), resume=False, reporter=SilentReporter())
    config = tiny(tmp_path, "softmax", max_steps=1)
    train_run(config, tmp_path / "runs" / "softmax", resume=False, reporter=SilentReporter())
    run(EvidenceAnalysis(runs=(tmp_path / "runs",), out=tmp_path / "out"))
    rows = json.loads((tmp_path / "out" / "runs.json").read_text())["rows"]
    # What is written to the record and how often makes no other result.
    settings = [f"{setting_name(config)} training.resample_every={every}: accuracy, %" for every in (1, 10)]
    assert [row["setting"] for row in rows if row["attention"] != "softmax"] == settings
    curves = json.loads((tmp_path / "out" / "runs-curves.json").read_text())["rows"]
    assert {point["setting"] for point in curves} == {row["setting"] for row in rows}


def measure_on_recall(monkeypatch, values):
    """Let the answers come from these accuracies, one or several seeds each."""
    found = [
        number
        for name, accuracies in values.items()
        for number in numbers(name, dict(enumerate(accuracies)), recommending._SETTING)
    ]
    rows = [comparison.as_row() for comparison in comparisons(found)]
    facts = {"processor": "a machine", "date": "2026-11-17T00:00:00"}
    monkeypatch.setattr(recommending, "measurements", lambda: {"rows": rows, "environment": facts})


@pytest.fixture
def evidence(monkeypatch):
    values = {"softmax": 100.0, "linear-elu": 90.0, "gmm-prf": 99.5, "gmm-rks": 99.4, "gmm-prf:redraw=false": 95.0}
    measure_on_recall(monkeypatch, {name: [value] for name, value in values.items()})


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


@pytest.mark.parametrize(
    ("values", "attention"),
    [
        ({"gmm-rks": [100, 100], "gmm-prf": [99.6, 99.6]}, "gmm-prf"),  # less work
        ({"atoms-rks": [100, 100], "fastfood-rks": [99.5, 100]}, "fastfood-rks"),  # the paper's
        ({"gmm-rks:redraw=false": [100, 100], "gmm-rks:frozen=true": [100, 100], "gmm-rks": [99.8, 100]}, "gmm-rks"),
        ({"gmm-rks": [99.8, 100], "generative-rks": [99.9, 99.9]}, "generative-rks"),  # a smaller deviation
        ({"generative-rks": [100, 100], "fastfood-rks": [100, 100]}, "fastfood-rks"),  # the order of names
    ],
)
def test_a_rule_decides_among_equals(monkeypatch, values, attention):
    for order in (values, dict(reversed(values.items()))):
        measure_on_recall(monkeypatch, order)
        assert recommend(Needs(length=16_384)).attention == attention


def test_the_cheapest_is_one_that_fits_the_other_needs(monkeypatch):
    measure_on_recall(monkeypatch, {"gmm-prf": [99], "gmm-rks:redraw=false": [98]})
    assert recommend(Needs(length=512, budget=1e-6)).attention == "gmm-prf"
    answer = recommend(Needs(length=512, budget=1e-6, deterministic=True))
    assert answer.attention == "gmm-rks:redraw=false"
    assert [candidate["attention"] for candidate in answer.candidates] == ["gmm-rks:redraw=false"]


@pytest.mark.parametrize(
    ("situation", "needs"),
    [
        ("short sequences", [Needs(length=8 * size, head_dim=size) for size in (2, 8, 32)]),
        ("long sequences", [Needs(length=length, head_dim=32) for length in (16 * 32, 4096, 100_000)]),
        ("outputs that must be the same every time", [Needs(length=4096, deterministic=True)]),
    ],
)
def test_the_page_says_what_the_command_says(situation, needs):
    page = (Path(klformer.__file__).parents[1] / "docs" / "howto" / "choose.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {situation}")]
    first = re.search("`(.*?)`", row.split("|")[2]).group(1)
    assert {recommend(each).attention for each in needs} == {first}


def test_work_is_counted_in_multiplications():
    assert relative_work("softmax", 10, 8) == 1
    # D = 8, R = 16: 2 R D + 2 F E = 256 + 256 for PRF and 256 + 512 for RKS, softmax 2 L D = 1600.
    assert relative_work("gmm-prf", 100, 8) == pytest.approx(512 / 1600)
    assert relative_work("gmm-rks", 100, 8) == pytest.approx(768 / 1600)


def test_times_are_those_of_the_docs_and_lie_between_them():
    data = json.loads((Path(klformer.__file__).parents[1] / "research/data/attentions.json").read_text())
    measured = {
        (row["name"], row["length"]): row["seconds"]["median"] for row in data["rows"] if row["setting"] == "time"
    }
    for name in ("gmm-rks", "linear-elu", "performer", "atoms-prf"):
        ratios = [measured[name, length] / measured["softmax", length] for length in (256, 512, 8192)]
        assert [relative_time(name, length, 64) for length in (256, 512, 8192)] == pytest.approx(ratios)
        assert relative_time(name, 362, 64) == pytest.approx(math.sqrt(ratios[0] * ratios[1]), rel=0.01)
        assert relative_time(name, 16_384, 64) < ratios[2]
    assert relative_time("softmax", 77, 32) == 1


def test_what_is_slower_than_softmax_is_no_answer(monkeypatch):
    measure_on_recall(monkeypatch, {"softmax": [100], "fastfood-rks": [100], "linear-elu": [90]})
    # At 512 it has 0.75 of the multiplications and takes 1.1 of the time.
    assert relative_work("fastfood-rks", 512, 64) < 1 < relative_time("fastfood-rks", 512, 64)
    answer = recommend(Needs(length=512))
    assert answer.attention == "softmax"
    assert "1 are not faster than softmax at this length, such as fastfood-rks" in answer.reasons
    assert recommend(Needs(length=1024)).attention == "fastfood-rks"


def test_the_package_has_measurements():
    answer = recommend(Needs(length=4096))
    assert {"softmax", "linear-elu"} <= {row["attention"] for row in answer.candidates}


def glue_row(task, attention, seed, value, *, start="-pretrained", metric="accuracy"):
    return {"setting": f"{task}-laptop{start}: {metric}, %", "attention": attention, "seed": seed, "value": value}


def test_gains_are_paired_by_seed_and_marked_only_where_they_are_more_than_chance():
    tuned = [glue_row("sst2", "softmax", seed, 80.0 + seed) for seed in range(3)]
    scratch = [glue_row("sst2", "softmax", seed, 70.0 + 2 * seed, start="") for seed in range(3)]
    others = [glue_row("sst2", "gmm-rks", 0, 90.0), glue_row("rte", "softmax", 0, 50.0)]
    table = gains([*scratch, *tuned, *others])
    heading = "| setting | attention | pairs | from scratch | pretrained | difference |"
    row = "| sst2-laptop: accuracy, % | `softmax` | 3 | 72.00 +- 1.15 | 81.00 +- 0.58 | **+9.00 +- 0.58** |"
    assert table.splitlines() == [heading, "|---|---|---|---|---|---|", row]
    assert "+9.50" in gains([*scratch[:2], *tuned[:2]])
    assert "**" not in gains([*scratch[:2], *tuned[:2]])


def test_pretrained_runs_beside_the_frequency_of_tokens(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("one two three\nwords and other words\n" * 90)
    flags = [
        "--data.max-len=16",
        "--data.tokens.vocab-size=60",
        "--training.max-steps=2",
        "--training.evaluate-every=1",
    ]
    cli(
        capsys,
        "pretrain",
        f"--data.train={tmp_path / 'book.txt'}",
        *flags,
        f"--out={tmp_path / 'runs'}",
        "--name=masked",
    )
    labels = tmp_path / "runs" / "labels"
    train_run(tiny(tmp_path, "softmax", max_steps=1), labels, resume=False, reporter=SilentReporter())
    analyse_pretraining(PretrainingAnalysis(runs=(tmp_path / "runs",), out=tmp_path / "out"))
    (row,) = json.loads((tmp_path / "out" / "pretraining.json").read_text())["rows"]
    result = json.loads((tmp_path / "runs" / "masked" / "result.json").read_text())
    assert row["masked_accuracy"] == 100 * result["test"]["masked_accuracy"]
    assert row["unigram_perplexity"] == result["unigram"]["perplexity"]
    curve = json.loads((tmp_path / "out" / "pretraining-curves.json").read_text())["rows"]
    assert [point["step"] for point in curve] == [1, 2]
    assert (tmp_path / "out" / "pretraining.png").stat().st_size > 10_000
    assert "written to" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="was pretrained to its end"):
        analyse_pretraining(PretrainingAnalysis(runs=(labels,)))
