"""`klformer analyze` on small runs, typed as a user would, and what it writes."""

import csv
import json
import math
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from matplotlib import pyplot as plt
from support import TINY

from klformer.lab.analysis import eigenvalues
from klformer.lab.analysis.kernel import command as kernel
from klformer.lab.analysis.kernel import figures as kernel_figures
from klformer.lab.analysis.output import some_of, write_results
from klformer.lab.analysis.variance import command as variance
from klformer.lab.analysis.variance.measure import variance_metrics
from klformer.lab.cli.main import main
from klformer.lab.data import Examples, Sequences, collate
from klformer.lab.report.analysis_tables import variance_table
from klformer.lab.report.collect import read_analysis
from klformer.lab.runs.load import load_run
from klformer.lab.tables import MISSING
from klformer.lab.training.evaluation import evaluate, evaluating, model_outputs, outputs_of_draws
from klformer.lab.training.objectives import Classification
from klformer.lab.training.progress import SilentReporter
from klformer.models import SequenceEmbedding
from research.gradients import command as gradients
from research.turing import command as turing

TINY_DEEP = [*TINY, "--model.num-layers", "2", "--quiet"]
#: Of the 45 validation examples.
IN_THREE_BATCHES = ["--training.evaluation-batch-size", "16"]
ATTENTIONS = ("gmm-rks", "gmm-prf", "fastfood-prf", "softmax")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Small runs of four attentions."""
    home = tmp_path_factory.mktemp("analyze")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLFORMER_DATA", str(home / "data"))
        for name in ATTENTIONS:
            options = "" if name == "softmax" else ":num_frequencies=8"
            folder = ["--out", str(home / "runs"), "--name", name]
            main(["train", "--attention", name + options, *TINY_DEEP, *IN_THREE_BATCHES, *folder])
        yield home / "runs"


def analyze(capsys, *arguments):
    main(["analyze", *(str(argument) for argument in arguments)])
    return capsys.readouterr().out


def results(folder, name):
    """Rows of the JSON, after checking that it is strict and that the other files are there and agree."""
    report = json.loads((folder / f"{name}.json").read_text(), parse_constant=pytest.fail)
    with (folder / f"{name}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(report["rows"])
    assert (folder / f"{name}.png").stat().st_size > 5000
    assert report["caption"].split()[0] in (folder / f"{name}.svg").read_text()
    return report["rows"]


def test_variance(runs, tmp_path, capsys):
    folders = [runs / name for name in ATTENTIONS]
    out = analyze(capsys, "variance", *folders, "--draws", "4", "--limit", "20", "--out", tmp_path)
    assert "softmax has nothing that is drawn at random; left out" in out
    assert "R^2 rsd-pi, sparsity 0.5: " in out
    rows = results(tmp_path, "variance")
    assert [row["attention"] for row in rows] == [
        "gmm-rks:num_frequencies=8",
        "gmm-prf:num_frequencies=8",
        "fastfood-prf:num_frequencies=8",
    ]
    assert {row["task"] for row in rows} == {"sparsity 0.5"}
    assert results(tmp_path, "variance-correlations") == rows

    loaded = load_run(runs / "gmm-prf", SilentReporter())
    examples = some_of(loaded.task.load("validation"), 20)
    batch = collate(examples, np.arange(20))
    with evaluating(loaded.model):
        scores = outputs_of_draws(loaded.model, batch, range(4), seed=0).double().numpy()
    expected = variance_metrics(scores, examples.targets)
    assert rows[1]["rsd"] == pytest.approx(expected.rsd, rel=1e-4)
    assert rows[1]["pi"] == pytest.approx(expected.pi)


def test_below_three_runs_there_is_no_correlation(runs, tmp_path, capsys):
    out = analyze(capsys, "variance", runs / "gmm-rks", "--draws", "2", "--limit", "20", "--out", tmp_path)
    assert "no R^2 for sparsity 0.5: it takes 3 runs of the task, there are 1" in out
    assert len(results(tmp_path, "variance")) == 1
    assert json.loads((tmp_path / "variance.json").read_text())["settings"]["r_squared"] == {}
    assert not (tmp_path / "variance-correlations.json").exists()


def test_some_of_examples_that_are_sorted_have_all_classes():
    """IMDB comes class by class: the first ones would be of one class."""
    targets = np.repeat([0, 1], 500)
    examples = Examples(Sequences.from_list([np.array([1])] * 1000), targets)
    some = some_of(examples, 100)
    assert len(some) == 100
    assert 0.35 < some.targets.mean() < 0.65
    assert np.array_equal(some.targets, some_of(examples, 100).targets)
    assert some_of(examples, None) is some_of(examples, 2000) is examples


def measured(run, task, rsd, pi, agv):
    known = {"run": run, "attention": run[:-1], "task": task, "seed": int(run[-1]), "folder": "runs"}
    return known | {"rsd": rsd, "rsd_median": rsd, "pi": pi, "agv": agv, "voting_accuracy": 0.5}


def test_correlations_are_of_one_task():
    """Within each task RSD and PI fall on a line, one up and one down; two runs are too few."""
    rows = [measured(f"a{x}", "sparsity 0.5", x, 2 * x, 1.0) for x in (1, 2, 3)]
    rows += [measured(f"b{x}", "sparsity 0.1", x, 9 - x, 1 + x % 2) for x in (1, 2, 3)]
    rows += [measured(f"c{x}", "text", x, x, x) for x in (1, 2)]
    found = variance.correlate(rows)
    assert list(found) == ["sparsity 0.5", "sparsity 0.1"]
    assert found["sparsity 0.5"]["rsd-pi"] == found["sparsity 0.1"]["rsd-pi"] == pytest.approx(1)
    assert found["sparsity 0.1"]["rsd-agv"] == pytest.approx(0)
    assert found["sparsity 0.5"]["rsd_median-pi"] == pytest.approx(1)
    lines = list(variance.describe_correlations(rows, found))
    assert "R^2 rsd-agv, sparsity 0.5: not defined over 3 runs" in lines
    assert lines[-1] == "no R^2 for text: it takes 3 runs of the task, there are 2"
    figure = variance.draw_correlations(rows, found)
    assert [axes.get_title() for axes in figure.axes][::3] == [
        "sparsity 0.5, 3 runs\nR² not defined",
        "sparsity 0.1, 3 runs\nR² 0.00",
    ]
    # All seeds of an attention look alike.
    assert all([len(points.get_offsets()) for points in axes.collections] == [3] for axes in figure.axes)
    plt.close(figure)


def test_dots_are_means_over_seeds_with_their_standard_error():
    rows = [measured(f"a{seed}", "text", rsd, 1.0, 1.0) for seed, rsd in enumerate((1.0, 3.0))]
    figure = variance.draw_dots([*rows, measured("b0", "text", 5.0, 1.0, 1.0)])
    first = figure.axes[0]
    assert [dot[0].get_xdata().item() for dot in first.containers] == [2.0, 5.0]
    assert [label.get_text() for label in first.get_yticklabels()] == ["a", "b"]
    segments = [segment for bars in first.collections for segment in bars.get_segments()]
    assert [(ends[0][0], ends[1][0]) for ends in segments] == [(1.0, 3.0), (5.0, 5.0)]
    plt.close(figure)


def test_dots_have_the_colour_of_their_map():
    names = ("gmm-rks", "gmm-prf:num_frequencies=8", "performer", "rbf-rks", "mine")
    rows = [measured("a0", "text", 1.0, 1.0, 1.0) | {"attention": name} for name in names]
    figure = variance.draw_dots(rows)
    rks, prf, fixed = variance.KINDS.values()
    assert [dot[0].get_color() for dot in figure.axes[0].containers] == [rks, prf, fixed, fixed, fixed]
    plt.close(figure)


def test_numbers_that_are_not_finite_are_null_and_missing_in_the_report(tmp_path):
    rows = [measured("a1", "text", math.inf, 1.0, math.nan), measured("b1", "text", 0.5, 2.0, 1.0)]
    settings = {"r_squared": {"text": {"rsd-pi": math.nan}}, "nested": [(-math.inf, tmp_path)]}
    write_results(
        tmp_path, "variance", caption="Caption.", rows=rows, settings=settings, figure=variance.draw_dots(rows)
    )
    assert [row["rsd"] for row in results(tmp_path, "variance")] == [None, 0.5]
    written = json.loads((tmp_path / "variance.json").read_text())["settings"]
    assert written == {"r_squared": {"text": {"rsd-pi": None}}, "nested": [[None, str(tmp_path)]]}
    table = variance_table(read_analysis(tmp_path / "variance.json").rows)
    assert (table.rows[0][3], table.rows[0][5]) == (MISSING, MISSING)


@pytest.fixture
def asked_for(monkeypatch):
    """The draws that are computed, batch by batch, with two of them in a file."""
    asked, original = [], variance.each_draw

    def each_draw(model, batch, draws, *, seed):
        asked.append(list(draws))
        return original(model, batch, draws, seed=seed)

    monkeypatch.setattr(variance, "each_draw", each_draw)
    monkeypatch.setattr(variance, "BLOCK", 2)
    return asked


def test_variance_goes_on_where_it_was(runs, tmp_path, capsys, asked_for):
    arguments = ["variance", runs / "gmm-rks", "--draws", "5", "--out", tmp_path]
    analyze(capsys, *arguments)
    before = results(tmp_path, "variance")
    num_batches = len(asked_for)
    assert num_batches == 3
    stored = sorted((tmp_path / "variance-scores").rglob("*.npy"))
    assert len(stored) == 3 * num_batches
    stored[1].unlink()
    asked_for.clear()
    analyze(capsys, *arguments)
    assert asked_for == [[2, 3]] + [[]] * (num_batches - 1)
    assert results(tmp_path, "variance") == before


@pytest.mark.parametrize("name", ["gmm-rks", "fastfood-prf"])
def test_more_draws_start_from_those_that_are_there(runs, tmp_path, capsys, asked_for, name):
    def rows(draws, folder):
        analyze(capsys, "variance", runs / name, "--draws", draws, "--limit", 20, "--out", tmp_path / folder)
        return results(tmp_path / folder, "variance")

    few = rows(3, "grown")
    asked_for.clear()
    many = rows(7, "grown")
    assert set(map(tuple, asked_for)) == {(3, 4, 5, 6)}
    assert many == rows(7, "at once")
    asked_for.clear()
    assert rows(3, "grown") == few
    assert not any(asked_for)


def test_the_first_part_is_computed_once_a_batch(runs, tmp_path, capsys, asked_for, monkeypatch):
    calls, compute = [], SequenceEmbedding.forward
    monkeypatch.setattr(SequenceEmbedding, "forward", lambda *a, **k: calls.append(1) or compute(*a, **k))
    analyze(capsys, "variance", runs / "gmm-rks", "--draws", "6", "--out", tmp_path)
    assert len(calls) == len(asked_for)


KILLED = """
import os, signal, sys
import numpy as np
from klformer.lab.cli.main import main
from klformer.lab.analysis.variance import command as variance

variance.BLOCK, saved, save = 2, [], np.save

def save_some(file, scores):
    if len(saved) == 3:
        file.write(b"half of a file")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    saved.append(file)
    save(file, scores)

np.save = save_some
main(sys.argv[1:])
"""


def test_a_killed_analysis_goes_on_to_the_same_numbers(runs, tmp_path, capsys, asked_for):
    arguments = ["variance", str(runs / "gmm-prf"), "--draws", "4", "--out"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, "analyze", *arguments, str(tmp_path / "killed")], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "variance.json").exists()
    analyze(capsys, *arguments, tmp_path / "killed")
    assert asked_for[:2] == [[], [2, 3]]
    analyze(capsys, *arguments, tmp_path / "whole")
    assert results(tmp_path / "killed", "variance") == results(tmp_path / "whole", "variance")


@pytest.mark.parametrize("name", ["gmm-rks", "fastfood-prf", "softmax"])
def test_the_first_part_is_computed_once_and_changes_nothing(runs, name, monkeypatch):
    calls, compute = [], SequenceEmbedding.forward
    monkeypatch.setattr(SequenceEmbedding, "forward", lambda *a, **k: calls.append(1) or compute(*a, **k))
    loaded = load_run(runs / name, SilentReporter())
    batch = collate(loaded.task.load("validation"), np.arange(7))
    with evaluating(loaded.model):
        together = outputs_of_draws(loaded.model, batch, range(3), seed=1)
        assert len(calls) == 1
        for draw in range(3):
            alone = outputs_of_draws(loaded.model, batch, [draw], seed=1)
            torch.testing.assert_close(together[draw], alone[0], atol=1e-6, rtol=1e-5)
        with torch.no_grad():
            assert torch.equal(model_outputs(loaded.model, batch), alone[0]), "the model is as before"
    assert len(calls) == 5
    if name != "softmax":
        assert not torch.allclose(together[0], together[1])


def test_evaluation_agrees_with_the_scores(runs):
    loaded = load_run(runs / "gmm-prf", SilentReporter())
    examples = loaded.task.load("validation")
    result = evaluate(
        loaded.model,
        examples,
        accelerator=Accelerator(cpu=True),
        batch_size=16,
        objective=Classification(num_classes=9),
        draws=3,
        seed=0,
    )
    with evaluating(loaded.model):
        scores = outputs_of_draws(loaded.model, collate(examples, np.arange(len(examples))), range(3), seed=0)
    labels = torch.from_numpy(examples.targets)
    torch.testing.assert_close(torch.tensor(result.by_draw["accuracy"]), (scores.argmax(-1) == labels).float().mean(1))
    losses = torch.nn.functional.cross_entropy(scores.movedim(-1, 1), labels.expand(3, -1))
    assert result.loss == pytest.approx(losses.item(), rel=1e-5)


def test_eigenvalues_beside_those_at_initialisation(runs, tmp_path, capsys):
    folders = [runs / name for name in ATTENTIONS]
    out = analyze(capsys, "eigenvalues", *folders, "--quick", "--out", tmp_path)
    assert "softmax has no frequencies; left out" in out
    rows = results(tmp_path, "eigenvalues")
    assert len(rows) == 3 * 2 * 4
    assert all(0 <= row["minimum"] <= row["mean"] <= row["maximum"] for row in rows)
    trained = [row for row in rows if row["run"] == "gmm-rks"]
    assert any(row["mean"] != row["initial_mean"] for row in trained)
    assert {(row["task"], row["seed"]) for row in rows} == {("sparsity 0.5", 0)}


def test_seeds_share_a_panel_of_eigenvalues():
    heads = [eigenvalues.HeadSpectrum(layer, head, torch.tensor([0.5, 1.0])) for layer in (1, 2) for head in (1, 2)]
    figure = eigenvalues.draw_spectra({"gmm-rks, text": [(heads, heads)] * 3, "gmm-prf, text": [(heads, heads)]})
    several, one = figure.axes[:2]
    assert (len(several.lines), len(one.lines)) == (3 * 8, 8)
    assert [text.get_text() for text in several.get_legend().get_texts()] == ["at initialisation", "layer 1", "layer 2"]
    plt.close(figure)


def test_a_summary_of_eigenvalues_before_and_after():
    row = {"task": "text", "attention": "gmm-rks", "minimum": 0.1, "mean": 1.0, "maximum": 2.0}
    row |= {f"initial_{name}": 2 * row[name] for name in ("minimum", "mean", "maximum")}
    figure = eigenvalues.draw_summary([row, row | {"mean": 3.0}, row | {"task": "retrieval"}])
    before, after = figure.axes[0].lines
    assert (list(before.get_xdata()), list(after.get_xdata())) == ([2.0], [2.0])
    assert [axes.get_title() for axes in figure.axes] == ["text", "retrieval"]
    plt.close(figure)


def test_a_summary_leaves_out_what_did_not_move():
    still = {"task": "text", "attention": "gmm-rks:frozen=true"}
    still |= {f"{start}{name}": 1.0 for start in ("", "initial_") for name in ("minimum", "mean", "maximum")}
    moved = still | {"attention": "gmm-rks", "mean": 2.0}
    for rows, shown in (([moved, still], ["gmm-rks"]), ([still], ["gmm-rks:frozen=true"])):
        figure = eigenvalues.draw_summary(rows)
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == shown
        plt.close(figure)


def test_kernel(runs, tmp_path, capsys):
    analyze(capsys, "kernel", runs / "gmm-prf", "--quick", "--out", tmp_path)
    profiles = results(tmp_path, "kernel-profiles")
    assert all(row["trained"] == pytest.approx(1) for row in profiles if abs(row["delta"]) < 1e-9)
    assert len(results(tmp_path, "kernel-frequencies")) == 2 * 4
    weights = results(tmp_path, "kernel-attention")
    assert sum(row["weight"] for row in weights) == pytest.approx(2 * 4)


def test_recall_has_kernels_but_no_class_of_a_sequence(tmp_path, capsys):
    data = ["--data.num-examples", "32", "--data.num-pairs", "2", "--data.num-queries", "1", "--data.num-symbols", "4"]
    sizes = ["--attention", "gmm-prf:num_frequencies=8", "--training.max-steps", "1", "--quiet"]
    main(["train", "--task", "recall", *data, *sizes, "--out", str(tmp_path), "--name", "recall"])
    out = analyze(capsys, "kernel", tmp_path / "recall", "--quick", "--out", tmp_path / "out")
    assert "kernel-profiles, kernel-frequencies written" in out
    assert len(results(tmp_path / "out", "kernel-profiles")) == 61 * 2
    with pytest.raises(SystemExit):
        main(["analyze", "variance", str(tmp_path / "recall"), "--quick", "--out", str(tmp_path / "out")])
    assert "needs one class for each sequence; the task recall has none" in " ".join(capsys.readouterr().err.split())


def test_kernels_are_drawn_from_what_is_kept_of_them():
    row = {"layer": 1, "head": 1, "initial": 0.5, "initial_deviation": 0.1, "trained": 1.0, "trained_deviation": 0.2}
    rows = [row | {"delta": delta, "head": head} for head in (1, 2) for delta in (-1.0, 0.0)]
    figure = kernel_figures.draw_profiles(rows)
    first, second = figure.axes
    initial, trained, *_ = first.lines
    assert (list(initial.get_ydata()), list(trained.get_ydata())) == ([0.5, 0.5], [1.0, 1.0])
    assert (first.get_title(), second.get_title()) == ("layer 1, head 1", "layer 1, head 2")
    plt.close(figure)
    weights = [{"layer": 1, "head": h, "position": p, "weight": h / (p + 1)} for h in (1, 2) for p in (0, 1, 2)]
    figure = kernel_figures.draw_attention(weights)
    (image,) = figure.axes[0].images
    # As a multiple of an even share: three positions.
    assert image.get_array()[1].tolist() == pytest.approx([6.0, 3.0, 2.0])
    plt.close(figure)


@pytest.fixture(scope="module")
def milestones(tmp_path_factory):
    """Two runs that kept their milestones, of which one has reached none; what counts are 10% and 99%."""
    home = tmp_path_factory.mktemp("milestones")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLFORMER_DATA", str(home / "data"))
        patch.setattr("klformer.lab.training.callbacks.MILESTONES", (10, 99))
        patch.setattr("research.gradients.command.MILESTONES", (10, 99))
        options = ["--attention", "gmm-rks:num_frequencies=8", *TINY_DEEP, "--out", str(home), "--name"]
        main(
            ["train", *options, "longer", "--training.max-steps", "60", "--optimiser.learning-rate", "0.01"],
        )
        main(["train", *options, "nowhere"])
        for checkpoint in (home / "nowhere" / "checkpoints").glob("reached*"):
            shutil.rmtree(checkpoint)
        yield home


def test_gradients_at_the_milestones(milestones, tmp_path, capsys):
    reached = json.loads((milestones / "longer" / "result.json").read_text())["first_reached"]
    assert "10" in reached
    out = analyze(capsys, "gradients", milestones / "longer", "--quick", "--out", tmp_path)
    first, second = results(tmp_path, "gradients")
    assert (first["reached"], first["step"], first["task"]) == (10, reached["10"], "sparsity 0.5")
    assert 0 < first["per_pass_deviation"] < first["per_example_deviation"]
    assert 0 < first["per_pass_mean_absolute"] < first["per_example_mean_absolute"]
    assert (second["reached"], second["step"], second["per_pass_deviation"]) == (99, None, None)
    assert all(word in out for word in ("per pass", "per example", "not reached"))
    caption = json.loads((tmp_path / "gradients.json").read_text())["caption"]
    assert "per pass, one value a draw" in caption
    assert "per example, one value a draw and example" in caption


def test_a_run_that_reached_no_milestone_keeps_its_place_and_its_curve(milestones, tmp_path, capsys, monkeypatch):
    figures, original = [], gradients.write_results
    monkeypatch.setattr(
        gradients, "write_results", lambda *a, **k: figures.append(k.get("figure")) or original(*a, **k)
    )
    out = analyze(capsys, "gradients", milestones / "nowhere", "--quick", "--out", tmp_path)
    assert "-: not reached" in out
    rows = results(tmp_path, "gradients")
    assert [(row["run"], row["reached"], row["step"]) for row in rows] == [("nowhere", 10, None), ("nowhere", 99, None)]
    with (tmp_path / "gradients.csv").open() as file:
        assert [row["per_pass_deviation"] for row in csv.DictReader(file)] == ["", ""]
    curve = figures[0].axes[0].lines[0]
    points = json.loads((tmp_path / "curves.json").read_text())["rows"]
    assert list(curve.get_xdata()) == [point["step"] for point in points] != []


def test_seeds_of_the_gradients_are_taken_together():
    """Two seeds: one thick curve and two thin ones, and the mean of the deviations at a milestone."""
    known = {"attention": "gmm-rks", "task": "sparsity 0.5"}
    rows = [
        known | {"reached": 20, "per_pass_deviation": value, "per_example_deviation": value} for value in (1.0, 3.0)
    ]
    rows.append(known | {"reached": 40, "per_pass_deviation": None, "per_example_deviation": None})
    points = [known | {"run": run, "step": step, "accuracy": step + run} for run in (0, 2) for step in (10, 20)]
    figure = gradients.draw(rows, points)
    curves, per_pass, _ = figure.axes
    assert [list(line.get_ydata()) for line in curves.lines] == [[10, 20], [12, 22], [11, 21]]
    assert len(curves.get_legend_handles_labels()[1]) == 1
    assert (list(per_pass.lines[0].get_xdata()), list(per_pass.lines[0].get_ydata())) == ([20], [2.0])
    plt.close(figure)


def test_the_bar_of_the_gradients_moves_with_every_draw(milestones, tmp_path, capsys, monkeypatch):
    moved, totals = [], []

    class Bar(gradients.Progress):
        def add_task(self, *arguments, total, **named):
            totals.append(total)
            return super().add_task(*arguments, total=total, **named)

        def advance(self, *arguments):
            moved.append(1)
            super().advance(*arguments)

    monkeypatch.setattr(gradients, "Progress", Bar)
    folders = [milestones / "longer", milestones / "nowhere"]
    analyze(capsys, "gradients", *folders, "--draws", "3", "--examples", "4", "--out", tmp_path)
    assert totals == [3]
    assert len(moved) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["variance", "RUNS/softmax"], "none of the runs has noise to draw"),
        (["variance", "RUNS/gmm-rks", "--draws", "1"], "draws must be at least 2, got 1"),
        (["variance", "RUNS/gmm-rks", "--limit", "0"], "limit must be at least 1, got 0"),
        (["eigenvalues", "RUNS/gmm-rks", "--draws", "0"], "draws must be at least 1, got 0"),
        (["kernel", "RUNS/gmm-rks", "--draws", "0"], "draws must be at least 1, got 0"),
        (["kernel", "RUNS/gmm-rks", "--quick", "--draws", "-3"], "draws must be at least 1, got -3"),
        (["gradients", "RUNS/gmm-rks", "--draws", "0"], "draws must be at least 1, got 0"),
        (["gradients", "RUNS/gmm-rks", "--examples", "0"], "examples must be at least 1, got 0"),
        (["gradients"], "give at least one run"),
        (["mse", "--draws", "1"], "draws must be at least 2, got 1"),
        (["turing", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["turing", "--steps", "0"], "steps must be at least 1, got 0"),
        (["variance", "RUNS/nowhere"], "there is no run in RUNS/nowhere"),
        (["eigenvalues", "RUNS/softmax"], "none of the runs has frequencies"),
        (["kernel", "RUNS/softmax"], "softmax has no frequencies to look at"),
        (
            ["kernel", "RUNS/gmm-rks", "--example", "1000", "--quick"],
            "at least 0 and below 45, got 1000",
        ),
    ],
)
def test_what_cannot_be_analysed_is_said(runs, tmp_path, capsys, arguments, message):
    arguments = [argument.replace("RUNS", str(runs)) for argument in arguments]
    with pytest.raises(SystemExit):
        main(["analyze", *arguments, "--out", str(tmp_path)])
    assert message.replace("RUNS", str(runs)) in capsys.readouterr().err


def test_what_is_no_run_is_left_out_and_what_is_damaged_is_said_at_the_end(runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    odd = tmp_path / "odd"
    shutil.copytree(runs / "gmm-rks", odd)
    (odd / "result.json").write_text("{}")
    folders = [str(folder) for folder in (tmp_path / "empty", tmp_path / "bad", odd, runs / "gmm-rks")]
    with pytest.raises(SystemExit) as caught:
        main(["analyze", "eigenvalues", *folders, "--out", str(tmp_path)])
    assert caught.value.code == 1
    said = capsys.readouterr()
    assert f"note: {tmp_path / 'empty'} is not a run and holds none; left out" in said.out
    assert f"klformer: runs that can't be read were left out: {tmp_path / 'bad' / 'config.json'}: " in said.err
    assert f"{odd / 'result.json'} is not a run's result: metric or validation is missing" in said.err
    assert {row["run"] for row in results(tmp_path, "eigenvalues")} == {"gmm-rks"}


QUICK = {
    "variance": (variance, ("draws", "limit")),
    "eigenvalues": (eigenvalues, ("draws",)),
    "kernel": (kernel, ("draws",)),
    "gradients": (gradients, ("examples", "draws")),
    "turing": (turing, ("seeds", "max_samples")),
}


@pytest.mark.parametrize("name", QUICK)
def test_what_is_given_wins_over_quick_and_the_help_says_what_is_not(name, capsys):
    module, options = QUICK[name]
    with pytest.raises(SystemExit):
        main(["analyze", name, "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for option in options:
        count = getattr(module, option.upper())
        assert count.choose(None, quick=False) == count.full
        assert count.choose(None, quick=True) == count.quick
        assert count.choose(7, quick=True) == count.choose(7, quick=False) == 7
        assert f"{'all' if count.full is None else count.full}, or {count.quick} with --quick" in shown


def test_an_example_that_is_not_there_leaves_nothing(runs, tmp_path):
    with pytest.raises(SystemExit):
        main(["analyze", "kernel", str(runs / "gmm-rks"), "--example", "45", "--quick", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_quick_with_an_option(runs, tmp_path, capsys):
    out = analyze(capsys, "variance", runs / "gmm-rks", "--quick", "--draws", "3", "--limit", "11", "--out", tmp_path)
    assert "variance over 3 draws" in out
    assert results(tmp_path, "variance")[0]["examples"] == 11
    analyze(capsys, "eigenvalues", runs / "gmm-rks", "--quick", "--draws", "3", "--out", tmp_path)
    analyze(capsys, "kernel", runs / "gmm-rks", "--quick", "--draws", "3", "--out", tmp_path)
    for name in ("variance", "eigenvalues", "kernel-profiles"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["settings"]["draws"] == 3
