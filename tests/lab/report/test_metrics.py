"""Runs speak of their own task and metric: tasks that the report does not know, and scores where less is better."""

import json
import re

import pytest
from matplotlib import pyplot as plt
from report_support import ACCURACY, MSE, edit, make_run, page_of, text_of

from klformer.errors import RunError
from klformer.lab.cli import curves
from klformer.lab.cli.curves import draw_curves
from klformer.lab.report.collect import collect
from klformer.lab.report.page import glance
from klformer.lab.report.run_tables import lra_table, setting_table
from klformer.lab.report.settings import make_settings


def titles(table):
    return [(column.group, column.title) for column in table.columns]


def test_an_unknown_task_is_shown_by_what_it_says_of_itself(tmp_path):
    about = {"title": "Five kinds", "label": "Five kinds of 7", "chance": 0.2}
    for name, accuracy in (("gmm-rks", 0.625), ("softmax", 0.5)):
        make_run(tmp_path / "runs" / name, name, task="five", accuracy=accuracy, about=about)
    (setting,) = make_settings(collect([tmp_path / "runs"]).runs)
    # Nobody here knows the usual options of the task, so that those that are not the attention's defaults are named.
    assert [group.attention for group, _ in setting.ranked()] == ["gmm-rks:num_frequencies=64", "softmax"]
    table = setting_table(setting)
    assert ("accuracy, %", "test") in titles(table)
    assert ("accuracy, %", "vote") in titles(table)
    assert ("accuracy, %", "paper") not in titles(table)
    text = text_of(page_of(tmp_path, tmp_path / "runs"))
    assert "Five kinds of 7 setting A 62.5% best here: gmm-rks:num_frequencies=64" in text
    assert "softmax here: 50.0%" in text
    assert "the commonest answer alone: 20.0%" in text


def test_a_regression_is_ranked_from_the_smallest_and_has_no_percent(tmp_path):
    errors = {"sparse": 0.25, "softmax": 12.5, "local": 0.5, "linear-elu": 0.25000001}
    for name, mse in errors.items():
        make_run(tmp_path / "runs" / name, name, task="fit", accuracy=mse, metric=MSE)
    (setting,) = make_settings(collect([tmp_path / "runs"]).runs)
    assert [group.attention for group, _ in setting.ranked()] == ["sparse", "linear-elu", "local", "softmax"]
    table = setting_table(setting)
    assert titles(table)[2:5] == [("mse", "test"), ("mse", "±"), ("mse", "validation")]  # no vote, no paper
    shown = [[cell.text for cell in row[:5]] for row in table.rows]
    assert shown[0] == ["sparse", "1", "0.25", "0.01", "0.2"]  # the smallest validation, not the largest
    assert shown[3][2] == "12.5"
    assert [row[2].best for row in table.rows] == [True, True, False, False]
    card = glance(setting)
    assert (card.score, card.softmax, card.chance, card.ties) == ("0.25", "12.5", "", 1)
    page = page_of(tmp_path, tmp_path / "runs")
    text = text_of(page)
    assert "0.25 mse best here: sparse and 1 with the same" in text
    assert "Validation mse against training steps" in text
    assert "Mse, memory and speed" in text
    assert "left and large is good" in text
    assert ">validation mse</text>" in page
    assert "commonest answer" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


def test_seeds_of_a_regression_are_averaged_in_its_unit(tmp_path):
    for seed, mse in enumerate((1.0, 2.0, 3.0)):
        make_run(tmp_path / str(seed), task="fit", seed=seed, accuracy=mse, metric=MSE)
    (group,) = make_settings(collect([tmp_path]).runs)[0].groups
    assert (group.score(), group.spread()) == (2.0, (1.0, "3 seeds"))


def test_a_regression_without_an_end_says_which_metric_is_missing(tmp_path):
    run = make_run(tmp_path / "run", task="fit", metric=MSE)
    score = json.loads((run / "result.json").read_text())["test"]
    edit(run / "result.json", test=score | {"mse": float("inf")})
    assert "no finished run of this setting has a test mse that is a number" in text_of(page_of(tmp_path, run))


def test_the_papers_figures_stand_beside_accuracies_only(tmp_path):
    make_run(tmp_path / "run", task="text", metric=MSE, accuracy=0.125)
    (setting,) = make_settings(collect([tmp_path]).runs)
    assert setting.paper_task is None
    assert glance(setting).paper == ""
    assert not any(cell.text == "0.125" for row in lra_table([setting]).rows for cell in row)


def test_tasks_have_the_papers_order_and_then_that_of_their_names(tmp_path):
    for task in ("zebra", "sparsity", "image", "apple", "listops"):
        make_run(tmp_path / task, task=task)
    settings = make_settings(collect([tmp_path]).runs)
    assert [setting.task.name for setting in settings] == ["listops", "image", "sparsity", "apple", "zebra"]


@pytest.mark.parametrize("metric", [ACCURACY, MSE])
def test_a_run_that_does_not_describe_its_task_has_its_name_and_what_its_lines_have(tmp_path, metric):
    run = make_run(tmp_path / "run", task="fit", metric=metric)
    (run / "task.json").unlink()
    (found,) = collect([tmp_path]).runs
    assert (found.task.name, found.task.label, found.task.chance) == ("fit", "fit", None)
    assert found.task.metric.name == ("accuracy" if metric == ACCURACY else "loss")
    page_of(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "is damaged: .*metric: Field required"),
        ('{"metric": {"name": "mse"}}', "is damaged: name: Field required"),
        (
            '{"name": "a", "title": "", "label": "", "chance": null, "metric": {"name": "a", "higher_is_better": 7}}',
            r"is damaged: metric\.higher_is_better: Input should be a valid boolean",
        ),
    ],
)
def test_a_description_that_is_broken_is_named(tmp_path, content, message):
    (make_run(tmp_path / "run") / "task.json").write_text(content)
    (damaged,) = collect([tmp_path / "run"]).damaged
    assert re.search(rf"task\.json {message}", damaged.problem)


@pytest.fixture
def drawn(monkeypatch):
    """Figures of `klformer curves`, kept in place of being written."""
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, target: figures.append(figure))
    yield figures
    for figure in figures:
        plt.close(figure)


def test_curves_take_folders_of_runs_and_leave_out_what_is_none(tmp_path, drawn):
    runs = tmp_path / "runs"
    make_run(runs / "a", "gmm-rks")
    make_run(runs / "deeper" / "b", "softmax", seed=3)
    (make_run(runs / "early", "performer") / "metrics.jsonl").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "summary.md").write_text("")
    said = []
    given = [runs, runs / "a", tmp_path / "empty", tmp_path / "summary.md"]
    draw_curves(given, tmp_path / "c.svg", say=said.append)
    (axes,) = drawn[0].axes
    assert [line.get_label() for line in axes.lines] == ["gmm-rks", "softmax, seed 3"]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([20, 40, 60])
    assert axes.get_ylabel() == "validation accuracy, %"
    assert said == [
        f"note: {tmp_path / 'empty'} is not a run and holds none: there is no config.json; left out",
        f"note: {tmp_path / 'summary.md'} is not a run and holds none: there is no config.json; left out",
        f"note: {runs / 'early'} has not been evaluated yet; left out",
    ]


def test_seeds_are_one_line_and_a_frozen_kernel_is_the_dashed_one_of_its_colour(tmp_path, drawn):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"a{seed}", "gmm-rks", seed=seed)
        make_run(tmp_path / f"f{seed}", "gmm-rks:frozen=true", seed=seed)
    make_run(tmp_path / "softmax", "softmax")
    draw_curves([tmp_path], tmp_path / "c.svg")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert set(lines) == {"gmm-rks, 3 seeds", "gmm-rks:frozen=true, 3 seeds", "softmax"}
    colours = {name: line.get_color() for name, line in lines.items()}
    assert colours["gmm-rks, 3 seeds"] == colours["gmm-rks:frozen=true, 3 seeds"] != colours["softmax"]
    assert lines["gmm-rks, 3 seeds"].get_linestyle() == "-" != lines["gmm-rks:frozen=true, 3 seeds"].get_linestyle()
    assert len(axes.collections) == 2, "bands"


def test_curves_of_a_regression_have_its_name_and_unit(tmp_path, drawn):
    make_run(tmp_path / "a", task="fit", metric=MSE)
    draw_curves([tmp_path], tmp_path / "c.svg")
    (axes,) = drawn[0].axes
    assert axes.get_ylabel() == "validation mse"
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.2, 0.4, 0.6])


def test_curves_of_different_metrics_are_refused(tmp_path):
    make_run(tmp_path / "a", task="fit", metric=MSE)
    make_run(tmp_path / "b")
    with pytest.raises(RunError, match=r"different metrics .*: .*mse \(a\)"):
        draw_curves([tmp_path], tmp_path / "c.svg")


def test_curves_without_anything_to_show_are_refused(tmp_path):
    with pytest.raises(RunError, match="is not a run and holds none"):
        draw_curves([tmp_path], tmp_path / "c.svg")
    (make_run(tmp_path / "early") / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="early has not been evaluated yet"):
        draw_curves([tmp_path], tmp_path / "c.svg")


def test_a_damaged_run_does_not_stop_curves(tmp_path, drawn):
    make_run(tmp_path / "a")
    (make_run(tmp_path / "b") / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"c\.svg is written without runs that are damaged: .*b/metrics\.jsonl, line 1"):
        draw_curves([tmp_path], tmp_path / "c.svg")
    assert len(drawn[0].axes[0].lines) == 1
