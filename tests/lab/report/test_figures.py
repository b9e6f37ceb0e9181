"""Figures of the report: what stands where, before it becomes SVG."""

import itertools

import pytest
from matplotlib import pyplot as plt
from report_support import edit, make_run

from klformer.lab.plotting import run_labels
from klformer.lab.report.collect import collect
from klformer.lab.report.drawing import Artist, distinct, look
from klformer.lab.report.figures import Bubble, draw_bubbles, draw_curves, draw_memory_by_task, draw_variance
from klformer.lab.report.run import ACCURACY, Metric
from klformer.lab.report.settings import make_settings


class Keeper(Artist):
    """Keeps figures open in place of writing them."""

    def __init__(self, attentions=()):
        super().__init__(None, attentions)
        self.kept, self.captions = [], []

    def finish(self, figure, name, title, caption):
        self.kept.append(figure)
        self.captions.append(caption)
        figure.draw_without_rendering()


@pytest.fixture
def keeper():
    keeper = Keeper(("softmax", "gmm-rks", "performer"))
    yield keeper
    for figure in keeper.kept:
        plt.close(figure)


def boxes(artists):
    return [artist.get_window_extent() for artist in artists if artist.get_visible()]


#: As measured on Text, and further apart.
GAINS = [(0.99504, 0.99824, 1.00470), (1.0, 1.0, 1.11220), (0.5, 0.9), (1.0, 1.0)]


@pytest.mark.parametrize("gains", GAINS)
def test_figures_of_voting_gain_can_be_read(keeper, gains):
    rows = [
        {"run": f"run{n}", "attention": f"a{n}", "rsd": 0.1, "pi": 12.5, "agv": agv, "voting_accuracy": 0.6}
        for n, agv in enumerate(gains)
    ]
    draw_variance(keeper, "text", "Text", rows, "")
    (figure,) = keeper.kept
    with look("test"):
        for axes in figure.axes:
            bars, labels = boxes(axes.patches), boxes(axes.texts)
            assert not any(bar.overlaps(label) for bar in bars if bar.width > 0 for label in labels)
            assert all(axes.bbox.x0 - 1 <= label.x0 and label.x1 <= axes.bbox.x1 + 6 for label in labels)
            ticks = [box for tick in axes.xaxis.get_major_ticks() for box in boxes([tick.label1]) if box.width]
            assert len(ticks) >= 2
            assert all(left.x1 + 2 < right.x0 for left, right in itertools.pairwise(ticks))
    gain = next(axes for axes in figure.axes if axes.get_title() == "AGV")
    assert [text.get_text() for text in gain.texts] == [f"{agv:.4f}"[:6] if agv < 1 else f"{agv:.3f}" for agv in gains]


def many_settings(folder, count):
    """Attentions of which only softmax was run everywhere."""
    for steps in range(1, count + 1):
        make_run(folder / f"softmax-{steps}", "softmax", training={"max_steps": steps})
    for name in ("gmm-rks", "performer"):
        make_run(folder / name, name, training={"max_steps": 1})
    return make_settings(collect([folder]).runs)


def test_memory_has_room_for_the_bars_that_there_are_only(keeper, tmp_path):
    draw_memory_by_task(keeper, many_settings(tmp_path, 7))
    (figure,) = keeper.kept
    (axes,) = figure.axes
    places = sorted(bar.get_y() + bar.get_height() / 2 for bar in axes.patches)
    assert len(places) == 9
    assert all(0.99 <= right - left < 2 for left, right in itertools.pairwise(places))
    bottom, top = axes.get_ylim()
    assert top <= places[0] - 0.5
    assert places[-1] + 0.5 <= bottom
    assert bottom - top < len(places) + 4
    assert [label.get_text() for label in axes.get_yticklabels()] == ["softmax", "gmm-rks", "performer"]
    assert figure.get_size_inches()[1] < 4
    assert "room" not in keeper.captions[0]


def test_memory_of_many_settings_is_bounded_and_says_what_it_leaves_out(keeper, tmp_path):
    draw_memory_by_task(keeper, many_settings(tmp_path, 31))
    (figure,) = keeper.kept
    assert figure.get_size_inches()[1] < 12
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in figure.axes[0].patches}
    assert len(looks) == 21
    assert keeper.captions[0].endswith("see the tables of the settings V, W, X, Y, Z, AA, AB, AC, AD, AE.")


@pytest.mark.parametrize("accuracies", [(100.0, 99.7, 100.0), (100.0,), (50.0, 100.0), (60.0, 61.0)])
def test_no_accuracy_above_100(keeper, accuracies):
    names = ("softmax", "gmm-rks", "performer")
    bubbles = [Bubble(name, accuracy, 2.0**28, 1.0) for name, accuracy in zip(names, accuracies, strict=False)]
    draw_bubbles(keeper, "bubbles", "Title", bubbles, "relative to softmax", ACCURACY)
    low, high = keeper.kept[0].axes[0].get_xlim()
    assert max(accuracies) < high <= 100.5
    assert low < min(accuracies)
    assert high - low >= 5


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_scores_that_are_no_shares_have_their_own_unit_and_direction(keeper, higher_is_better):
    metric = Metric("mse", higher_is_better=higher_is_better, percent=False)
    scores = (214.0, 215.0)
    bubbles = [Bubble(name, score, 2.0**28, 1.0) for name, score in zip(("softmax", "gmm-rks"), scores, strict=True)]
    draw_bubbles(keeper, "bubbles", "Title", bubbles, "relative to softmax", metric)
    (axes,) = keeper.kept[0].axes
    low, high = axes.get_xlim()
    assert low < 214 < 215 < high
    assert high - low > 10  # small differences do not look large
    assert axes.get_xlabel() == "test mse"
    assert f"Low, {'right' if higher_is_better else 'left'} and large is good" in keeper.captions[0]


def test_seeds_are_a_mean_with_a_band_and_frozen_kernels_do_not_hide_others(keeper, tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"learned{seed}", "gmm-rks", seed=seed)
    frozen = make_run(tmp_path / "frozen", "gmm-rks")
    edit(frozen / "config.json", attention={"name": "gmm-rks", "options": {"frozen": True}})
    (make_run(tmp_path / "once", "softmax") / "metrics.jsonl").write_text(
        '{"kind": "validation", "step": 1, "accuracy": 0.5}\n'
    )
    settings = make_settings(collect([tmp_path]).runs)
    for setting in settings:
        draw_curves(keeper, setting)
    axes = [figure.axes[0] for figure in keeper.kept]
    lines = {line.get_label(): line for one in axes for line in one.lines if not line.get_label().startswith("_")}
    assert "softmax" not in lines
    assert lines["gmm-rks:frozen=true"].is_dashed()
    assert lines["gmm-rks:frozen=true"].zorder > lines["gmm-rks"].zorder
    assert sum(len(one.collections) for one in axes) == 1


def test_long_names_stay_different():
    names = [f"sparsity0.5-laptop-generative-prf-num_frequencies=64-seed{seed}" for seed in range(3)]
    assert len(set(distinct(names))) == 3
    assert max(map(len, distinct(names))) <= 30
    alike = [f"{'a' * 40}{middle}{'b' * 40}" for middle in "xy"]
    assert [name.replace("\n", "") for name in distinct(alike)] == alike
    assert all(len(line) <= 30 for name in distinct(alike) for line in name.splitlines())


def test_long_names_leave_room_for_bars(keeper):
    measures = {"rsd": 0.1, "pi": 1.0, "agv": 1.0, "voting_accuracy": 0.5}
    attention = "gmm-prf:num_frequencies=64,frozen=true,num_components=16,tied=false"
    rows = [{"attention": attention, "run": "r", "seed": 0, "folder": folder} | measures for folder in ("one", "two")]
    draw_variance(keeper, "text", "Variance", rows, "caption")
    figure = keeper.kept[0]
    figure.canvas.draw()  # a figure whose axes collapse warns, which is an error here
    assert all(axes.get_position().width > 0.2 for axes in figure.axes)


def test_labels_say_no_more_than_tells_runs_apart():
    def row(attention, seed, folder, task="text"):
        return {"attention": attention, "task": task, "seed": seed, "folder": folder}

    assert run_labels([row("a", 0, "x"), row("b", 0, "x")]) == ["a", "b"]
    assert run_labels([row("a", 0, "x"), row("a", 1, "x")]) == ["a, seed 0", "a, seed 1"]
    assert run_labels([row("a", 0, "x"), row("a", 0, "y")]) == ["a, in x", "a, in y"]
    assert run_labels([row("a", 0, "x"), row("a", 0, "x", "image")]) == ["a, text", "a, image"]
    assert run_labels([row("a", 0, "x")] * 2) == ["a (1)", "a (2)"]
    assert run_labels([{"attention": "a"}] * 2) == ["a (1)", "a (2)"]
