"""The report: the paper's figures, what is read and refused, and the page in a real browser."""

import json
import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tyro
from cli_support import fails
from report_support import (
    ATTACK,
    Elements,
    edit,
    hostile,
    make_run,
    page_of,
    text_of,
    write_analyses,
    write_benchmark,
    write_models,
)

import klformer
from klformer.errors import RunError
from klformer.lab.cli import report as command
from klformer.lab.cli.report import Report
from klformer.lab.report import page
from klformer.lab.report.analysis_tables import eigenvalue_head_tables, eigenvalue_table
from klformer.lab.report.collect import collect
from klformer.lab.report.paper_numbers import EIGENVALUES
from klformer.lab.report.run_tables import confusion_table, glue_task, lra_table, rates_table, setting_table
from klformer.lab.report.settings import make_settings
from klformer.lab.tables import MISSING
from klformer.lab.tasks import Text


def test_what_the_paper_prints_is_shown_where_it_looks_different():
    papers = [row for row in eigenvalue_table([], []).rows if row[0].text == "paper"]
    assert [(row[4].text, row[4].note) for row in papers] == [
        ("0.486", ""),
        ("0.097", "printed 0.096"),
        ("0.499", ""),
        ("0.211", "printed 0.186"),
    ]
    for row, table in zip(papers, EIGENVALUES, strict=True):
        assert str(table.printed_mean) in (row[5].text, row[5].note.removeprefix("printed "))


def test_the_page_has_the_runs_beside_the_paper(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a", "gmm-rks", accuracy=0.625)
    make_run(tmp_path / "runs" / "b", "softmax", accuracy=0.5)
    page = page_of(tmp_path, tmp_path / "runs")
    text = text_of(page)
    assert "62.50 A" in text
    assert "63.95" in text  # the paper's
    steps, tokens = Text.presets["laptop"]["training"]["max_steps"], Text.presets["laptop"]["data"]["max_len"]
    assert f"{steps:,} steps of 32 sequences of at most {tokens:,} tokens" in text
    assert "20,000 steps of 32 sequences of at most 4,000 tokens" in text
    assert "47.08 printed 52.56" in text
    assert "torch 9.9.9" in text
    assert "validation on 10% of the training set (protocol holdout)" in text.lower()
    assert "runs: 2 finished, 0 unfinished" in capsys.readouterr().out


def test_both_movements_of_a_kernel_are_shown(tmp_path):
    make_run(tmp_path / "run", "gmm-rks")
    (setting,) = make_settings(collect([tmp_path]).runs)
    table = setting_table(setting)
    titles = [column.title for column in table.columns]
    shown = {title: cell.text for title, cell in zip(titles, table.rows[0], strict=True)}
    assert (shown["frequencies moved"], shown["kernel moved"]) == ("0.41", "0.37")


def test_a_budget_has_its_length_and_the_papers_is_called_its_own(tmp_path):
    make_run(tmp_path / "a", preset_name="paper", data={"max_len": None})
    make_run(tmp_path / "b", task="unheard of", data={"max_len": None})
    known, unknown = make_settings(collect([tmp_path]).runs)
    assert known.budget() == "20,000 steps of 32 sequences of at most 4,000 tokens, 4 layers of width 256"
    assert "tokens" not in unknown.budget()
    page = page_of(tmp_path, tmp_path)
    assert "larger budget" not in page
    assert "printed, at its own budget" in text_of(page)


def test_the_page_is_one_file_that_loads_nothing(tmp_path):
    make_run(tmp_path / "run")
    write_benchmark(tmp_path / "bench.json")
    page = page_of(tmp_path, tmp_path / "run", bench=tmp_path / "bench.json")
    elements = Elements(page)
    assert elements.open == []
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"img", "link", "iframe", "object", "embed", "audio", "video", "form", "base"}
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    for _, attributes in elements.found:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert (attributes.get("xlink:href") or "#").startswith("#")
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_figures_are_files_as_well(tmp_path):
    for task in ("listops", "text", "retrieval"):
        make_run(tmp_path / "runs" / f"{task}-gmm", "gmm-rks", task=task)
        make_run(tmp_path / "runs" / f"{task}-softmax", "softmax", task=task, accuracy=0.4)
    write_analyses(tmp_path / "runs" / "analysis")
    write_benchmark(tmp_path / "runs" / "bench" / "attention.json")
    write_models(tmp_path / "runs" / "bench")
    page_of(tmp_path, tmp_path / "runs")
    files = {path.name for path in (tmp_path / "out" / "report-figures").iterdir()}
    assert files == {
        *(f"{kind}-{letter}.svg" for kind in ("curves", "bubbles") for letter in "ABC"),
        "bubbles-average.svg",
        "memory-by-task.svg",
        "memory-against-length.svg",
        "seconds-against-length.svg",
        "model-memory-against-length.svg",
        *(f"model-speed-{task}.svg" for task in ("listops", "text", "retrieval", "image")),
        "variance-text.svg",
    }
    for name in files:
        ElementTree.parse(tmp_path / "out" / "report-figures" / name)


def test_analyses_are_found_beside_the_runs_or_where_one_says(tmp_path):
    make_run(tmp_path / "runs" / "text-run")
    write_analyses(tmp_path / "elsewhere")
    write_benchmark(tmp_path / "bench" / "attention.json", machine="a certain machine")
    nothing = text_of(page_of(tmp_path, tmp_path / "runs"))
    for what in ("variance of predictions over draws", "eigenvalues of these runs", "memory and time of one attention"):
        assert re.search(f"Missing: (the )?{what}", nothing)
    given = text_of(page_of(tmp_path, tmp_path / "runs", analysis=tmp_path / "elsewhere", bench=tmp_path / "bench"))
    shutil.move(tmp_path / "elsewhere", tmp_path / "runs" / "analysis")
    shutil.move(tmp_path / "bench", tmp_path / "runs" / "bench")
    found = text_of(page_of(tmp_path, tmp_path / "runs"))
    for text in (given, found):
        assert "0.777" in text
        assert "0.123" in text
        assert "Ten draws." in text
        assert "a certain machine" in text
        assert "Missing: the variance" not in text
        assert "Missing: memory and time of one attention" not in text


def test_analyses_of_runs_with_one_name_are_not_merged(tmp_path):
    for folder in ("one", "two"):
        write_analyses(tmp_path / folder, caption="Eigenvalues and so on.")
    path = tmp_path / "two" / "eigenvalues.json"
    edit(path, rows=[row | {"maximum": 0.333} for row in json.loads(path.read_text())["rows"]])
    analyses = collect([tmp_path]).eigenvalues
    rows = [row for row in eigenvalue_table(analyses, []).rows if row[0].text == "here"]
    assert [(row[0].note, row[3].text, row[4].text) for row in rows] == [
        ("text-run", "4", "0.777"),
        ("text-run", "4", "0.333"),
    ]
    assert [len(table.rows) for table in eigenvalue_head_tables(analyses)[:2]] == [4, 4]
    assert text_of(page_of(tmp_path, tmp_path)).count("Here: Eigenvalues and so on.") == 1


def test_what_is_missing_is_shown_as_missing(tmp_path):
    make_run(tmp_path / "runs" / "a", finished=False)
    (tmp_path / "runs" / "a" / "metrics.jsonl").unlink()
    make_run(tmp_path / "runs" / "b", "softmax", finished=False)
    text = text_of(page_of(tmp_path, tmp_path / "runs"))
    assert "2 of them not finished" in text
    assert "unfinished A" in text
    assert "Missing: memory by data set" in text
    assert "Missing: runs of GLUE tasks" in text
    assert "missing, it is written when a run ends" in text


def test_numbers_that_are_not_finite_are_missing(tmp_path):
    run = make_run(tmp_path / "run")
    score = json.loads((run / "result.json").read_text())["test"]
    edit(run / "result.json", test=score | {"accuracy": float("nan")}, peak_memory_bytes=None)
    page = page_of(tmp_path, run)
    text = text_of(page)
    assert "nan" not in text.lower().split()
    assert ">unfinished" not in page  # it is finished
    assert "\N{EN DASH} A, not a number" in text
    assert "no finished run of this setting has a test accuracy that is a number" in text
    (setting,) = make_settings(collect([run]).runs)
    (row,) = setting_table(setting).rows
    assert (row[3].text, row[3].sort, row[3].note) == ("\N{EN DASH}", None, "not a number")


def test_seeds_are_averaged(tmp_path):
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        make_run(tmp_path / f"s{seed}", seed=seed, accuracy=accuracy)
    (setting,) = make_settings(collect([tmp_path]).runs)
    (group,) = setting.groups
    assert group.score() == pytest.approx(60)
    assert group.spread() == (pytest.approx(10), "3 seeds")
    assert group.speed() == 1001


def test_classes_that_are_mixed_up_are_shown_for_the_best_attention(tmp_path):
    for seed, counts in enumerate(([[7, 3], [1, 9]], [[6, 4], [2, 8]])):
        folder = make_run(tmp_path / f"best{seed}", seed=seed, accuracy=0.9, about={"classes": ["spam & eggs", "ham"]})
        result = json.loads((folder / "result.json").read_text())
        edit(folder / "result.json", test=result["test"] | {"confusion": counts})
    make_run(tmp_path / "worse", "softmax", accuracy=0.5)
    (setting,) = make_settings(collect([tmp_path]).runs)
    table = confusion_table(setting)
    assert table.title == "What gmm-rks takes for what: test examples by class and answer, 2 runs added up"
    assert [column.title for column in table.columns] == ["class", "spam & eggs", "ham"]
    assert [[cell.text for cell in row] for row in table.rows] == [["spam & eggs", "13", "7"], ["ham", "3", "17"]]
    assert "spam &amp; eggs" in page_of(tmp_path, tmp_path)


@pytest.mark.parametrize("confusion", [None, 3, [[1, 2]], [[1, -2], [3, 4]], [[1, 2.5], [3, 4]], [["a", 1], [2, 3]]])
def test_what_is_no_table_of_classes_is_none(tmp_path, confusion):
    folder = make_run(tmp_path / "a")
    result = json.loads((folder / "result.json").read_text())
    edit(folder / "result.json", test=result["test"] | {"confusion": confusion})
    (setting,) = make_settings(collect([tmp_path]).runs)
    assert confusion_table(setting) is None


def test_copies_of_a_run_are_no_seeds(tmp_path):
    for folder in ("runs", "copies"):
        make_run(tmp_path / folder / "a", accuracy=0.5)
    (setting,) = make_settings(collect([tmp_path]).runs)
    (group,) = setting.groups
    assert group.spread() == (pytest.approx(1), "10 draws")  # not 0 over 2 seeds
    text = text_of(page_of(tmp_path, tmp_path))
    assert "± 1.00 over 10 draws, 2 runs, 1 seed" in text
    assert "gmm-rks 2 1 seed " in text
    assert " copies/a finished" in text
    assert " runs/a finished" in text
    make_run(tmp_path / "runs" / "b", seed=1, accuracy=0.7)
    (group,) = make_settings(collect([tmp_path]).runs)[0].groups
    assert group.score() == pytest.approx(60)  # a seed has the same weight, however often it was run
    assert group.spread() == (pytest.approx(100 * 0.02**0.5), "2 seeds")
    text = text_of(page_of(tmp_path, tmp_path))
    assert "± 14.14 over 2 seeds, 3 runs" in text
    assert " b finished" in text


def test_runs_with_one_name_are_told_apart(tmp_path):
    for folder in ("x/runs", "y/runs", "z"):
        make_run(tmp_path / folder / "a")
    assert [run.title for run in collect([tmp_path]).runs] == ["x/runs/a", "y/runs/a", "z/a"]
    assert [run.name for run in collect([tmp_path]).runs] == ["a"] * 3
    assert [run.title for run in collect([tmp_path / "x"]).runs] == ["a"]


def test_only_equal_settings_are_compared(tmp_path):
    make_run(tmp_path / "a", "gmm-rks")
    make_run(tmp_path / "b", "softmax", training={"log_every": 77})  # changes no result
    make_run(tmp_path / "c", "softmax", training={"max_steps": 7})
    make_run(tmp_path / "d", "softmax", task="sparsity", data={"sparsity": 0.1})
    settings = make_settings(collect([tmp_path]).runs)
    assert [(s.letter, s.task.label, len(s.runs)) for s in settings] == [
        ("A", "Text", 2),
        ("B", "Text", 1),
        ("C", "Sparsity 0.1", 1),
    ]
    assert settings[1].difference == ("training.max_steps = 7",)
    rows = [row for row in lra_table(settings).rows if row[0].note == "softmax" or row[0].text == "softmax"]
    assert [row[5].note for row in rows] == ["A", "B"]  # one row a setting, none of them averaged


def test_cards_of_one_task_say_what_sets_them_apart(tmp_path):
    make_run(tmp_path / "a", "softmax", training={"evaluate_every": 400})
    make_run(tmp_path / "b", "softmax", training={"evaluate_every": 50})
    cards = [page.glance(setting) for setting in make_settings(collect([tmp_path]).runs)]
    assert sorted(card.difference for card in cards) == [
        ("training.evaluate_every = 400",),
        ("training.evaluate_every = 50",),
    ]
    text = page_of(tmp_path, tmp_path)
    cards = text[text.index('<section id="glance">') : text.index('<section id="tasks">')]
    assert cards.count("training.evaluate_every = ") == 2
    make_run(tmp_path / "c", "softmax", training={"evaluate_every": 5, "max_steps": 7, "batch_size": 3})
    assert {page.glance(setting).difference for setting in make_settings(collect([tmp_path]).runs)} == {()}  # too long


def test_attentions_have_their_best_learning_rate_in_one_setting(tmp_path):
    def run(name, attention, rate, accuracy, **more):
        make_run(tmp_path / name, attention, accuracy=accuracy, optimiser={"learning_rate": rate}, **more)

    run("a", "gmm-rks", 0.002, 0.67, validation=0.61)  # better on the test set, by which nothing is chosen
    run("b", "gmm-rks", 0.006, 0.64, validation=0.62)
    run("c", "gmm-rks", 0.006, 0.66, validation=0.5, seed=1)
    run("d", "softmax", 0.002, 0.7)
    run("e", "softmax", 0.006, 0.5)
    run("f", "softmax", 0.02, 0.9, finished=False)
    run("g", "performer", 0.006, 0.5)  # without a choice
    together, alone = make_settings(collect([tmp_path]).runs)
    assert {group.attention: [run.name for run in group.runs] for group in together.groups} == {
        "softmax": ["d"], "gmm-rks": ["b", "c"],
    }  # fmt: skip
    assert {run.name for run in together.all_runs} == {"a", "b", "c", "d", "e", "f"}
    assert [run.name for run in alone.runs] == ["g"]
    assert rates_table(alone) is None
    assert together.difference == ('optimiser.learning_rate = "best of 0.002, 0.006"',)
    rows = [[cell.text for cell in row] + [row[1].note] for row in rates_table(together).rows]
    assert rows == [
        ["softmax", "0.002", "1", "70.00", "70.00", "chosen"],
        ["softmax", "0.006", "1", "50.00", "50.00", ""],
        ["softmax", "0.02", "0", MISSING.text, MISSING.text, ""],
        ["gmm-rks", "0.002", "1", "61.00", "67.00", ""],
        ["gmm-rks", "0.006", "2", "56.00", "65.00", "chosen"],
    ]
    text = text_of(page_of(tmp_path, tmp_path))
    assert "Every attention has its own learning rate, on validation the best of 0.002, 0.006." in text
    assert "Learning rates that were tried" in text


def test_a_run_that_is_older_than_a_field_has_its_default(tmp_path):
    make_run(tmp_path / "a", "gmm-rks", task="listops")
    for folder, features in (("b", "concat"), ("c", "difference")):
        make_run(tmp_path / folder, "softmax", task="listops", model={"pair_features": features})
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    del config["model"]["pair_features"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    settings = make_settings(collect([tmp_path]).runs)
    assert [{run.name for run in setting.runs} for setting in settings] == [{"a", "b"}, {"c"}]


@pytest.mark.parametrize("preset_name", ["laptop", "paper"])
def test_attentions_with_the_options_of_their_preset_are_called_by_their_name(tmp_path, preset_name):
    for name in klformer.attention_names():
        make_run(tmp_path / name, name, preset_name=preset_name)
    assert {run.attention for run in collect([tmp_path]).runs} == set(klformer.attention_names())


def test_variants_have_rows_of_their_own(tmp_path):
    make_run(tmp_path / "a", "gmm-rks", accuracy=0.61)
    make_run(tmp_path / "b", "gmm-rks:frozen=true", accuracy=0.62)
    rows = {row[0].text: row for row in lra_table(make_settings(collect([tmp_path]).runs)).rows}
    assert rows["GMM-RKS"][5].text == "61.00"
    assert rows["gmm-rks:frozen=true"][5].text == "62.00"
    assert rows["gmm-rks:frozen=true"][4].sort is None  # not in the paper


def test_an_average_needs_all_three_tasks(tmp_path):
    def average():
        rows = lra_table(make_settings(collect([tmp_path]).runs)).rows
        return next(row for row in rows if row[0].note == "gmm-rks")[-1]

    make_run(tmp_path / "a", task="listops", accuracy=0.2)
    make_run(tmp_path / "b", task="text", accuracy=0.3)
    assert average().sort is None
    make_run(tmp_path / "c", task="retrieval", accuracy=0.7)
    assert average().sort == pytest.approx(40)
    assert average().note == "A, B, C"  # what it is made of
    text = text_of(page_of(tmp_path, tmp_path))
    assert "among figures with the same letter" in text
    assert "down a column" not in text


def test_glue_runs_stand_in_the_glue_table(tmp_path):
    make_run(tmp_path / "a", task="glue-sst2", accuracy=0.8125)
    page = page_of(tmp_path, tmp_path / "a")
    assert "0.81 A" in text_of(page)
    assert "Missing: runs of GLUE" not in text_of(page)
    assert [glue_task(name) for name in ("glue/sst-2", "CoLA", "text")] == ["sst2", "cola", None]


def test_a_folder_given_twice_counts_once(tmp_path):
    make_run(tmp_path / "runs" / "a")
    assert len(collect([tmp_path / "runs", tmp_path / "runs" / "a", tmp_path / "runs" / "." / "a"]).runs) == 1


def test_where_the_data_lay_is_not_published(tmp_path):
    make_run(tmp_path / "run", data={"root": "/a/private/place"})
    assert "private/place" not in page_of(tmp_path, tmp_path / "run")


RUN_FILES = ("config.json", "result.json", "metrics.jsonl")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", r"config\.json is not JSON"),
        ("config.json", "[]", r"config\.json must hold an object"),
        ("config.json", "{}", "run has format 1, this klformer reads format 2"),
        ("config.json", '{"format": 2}', r"config\.json is not a run's configuration: 'task' is missing"),
        ("config.json", '{"format": 2, "task": "text", "preset": "x", "attention": 3}', r"config\.json .* 'attention'"),
        ("config.json", b"\xff\xfe", r"can't read .*config\.json"),
        ("result.json", '{"test": ', r"result\.json is not JSON"),
        ("result.json", "{}", r"result\.json is damaged: it has no 'test'"),
        ("metrics.jsonl", '{"kind": \n{}\n', r"metrics\.jsonl.* is damaged"),
        ("metrics.jsonl", '{"kind": "train"}\n', r"metrics\.jsonl.* is damaged"),
        ("metrics.jsonl", '{"kind": "train", "step": "7"}\n', r"metrics\.jsonl, line 1 is damaged"),
        (
            "metrics.jsonl",
            f'{{"kind": "validation", "accuracy": 0.5, "step": {"1" * 401}}}\n',
            r"metrics\.jsonl is damaged: a line has a step above 1,000,000,000,000",
        ),
        ("variance.json", '{"caption": "x"}', r"variance\.json has no list of rows"),
        ("variance.json", '{"rows": [{"run": "x"}]}', r"variance\.json: a row of rows has no 'attention'"),
        ("eigenvalues.json", "nonsense", r"eigenvalues\.json is not JSON"),
    ],
)
def test_what_is_broken_is_named(tmp_path, file, content, message):
    run = make_run(tmp_path / "runs" / "run")
    (run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    make_run(tmp_path / "runs" / "whole", "softmax")
    assert [bool(re.search(message, damaged.problem)) for damaged in collect([tmp_path / "runs"]).damaged] == [True]
    target = tmp_path / "page.html"
    with pytest.raises(RunError, match=message):
        command.report_runs(Report(runs=(tmp_path / "runs",), out=target))
    page = target.read_text()
    damaged = page[page.index('<section id="damaged">') : page.index('<section id="glance">')]
    assert f"<code>{'run' if file in RUN_FILES else file}</code>" in damaged
    assert str(tmp_path) not in damaged
    assert "softmax" in page


def test_a_model_of_transformers_is_no_run_and_replaces_no_page(tmp_path, capsys):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert", "hidden_size": 64}')
    page = tmp_path / "report.html"
    page.write_text("a page")
    assert "holds no run" in fails(capsys, 2, "report", tmp_path / "bert", "--out", page)
    assert page.read_text() == "a page"


def test_folders_without_a_run_are_left_out_with_a_note(tmp_path, capsys):
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    command.report_runs(Report(runs=(tmp_path / "empty", tmp_path / "run"), out=tmp_path / "page.html"))
    assert f"note: {tmp_path / 'empty'} holds no run; left out" in capsys.readouterr().out


def test_commands_that_make_what_is_missing_are_code(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "run"))
    assert "<code>klformer bench model --out bench</code> measures them, <code>--bench bench</code> shows" in page


def test_the_readers_results_come_first_and_the_papers_table_is_folded(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "run"))
    order = re.findall(r'<section id="(\w+)">', page)
    assert order[:3] == ["glance", "tasks", "cost"]
    assert order[-2:] == ["lra", "glue"]
    assert page.index("Look here first:") < page.index('<section id="glance">')
    before_table = page[page.index('<section id="lra">') : page.index('id="table-lra"')]
    assert "<details><summary>" in before_table
    assert "</details>" not in before_table


def test_what_is_not_there_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"empty holds no run \(no config.json\)"):
        collect([tmp_path / "empty"])
    with pytest.raises(ValueError, match=r"empty holds neither variance\.json"):
        collect([], analysis=tmp_path / "empty")
    with pytest.raises(ValueError, match="there is no benchmark"):
        collect([], bench=tmp_path / "empty")
    with pytest.raises(ValueError, match="give runs"):
        command.report_runs(Report(runs=()))
    make_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't write .*report\.html"):
        command.report_runs(Report(runs=(tmp_path / "run",), out=tmp_path / "file" / "report.html"))


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    out = tmp_path / "out"
    (out / "folder").mkdir(parents=True)
    (out / "rep-figures").write_text("somebody's")
    before = set(out.rglob("*"))
    monkeypatch.chdir(out)
    for target, message in (
        ("folder", r"can't write folder: it is a folder; name a file in it, such as folder/report\.html"),
        (".", r"can't write \.: it is a folder; name a file in it, such as report\.html"),
        ("rep.html", r"can't write figures to rep-figures: it is a file"),
    ):
        with pytest.raises(ValueError, match=message):
            command.report_runs(Report(runs=(run,), out=Path(target)))
        assert set(out.rglob("*")) == before
    monkeypatch.setattr(page, "draw_memory_by_task", lambda *_: os.open(tmp_path / "nowhere", os.O_RDONLY))
    with pytest.raises(ValueError, match=r"can't write page\.html: No such file"):
        command.report_runs(Report(runs=(run,), out=Path("page.html")))
    assert set(out.rglob("*")) == before


def test_a_smaller_page_removes_figures_of_the_larger_and_nothing_else(tmp_path):
    for task in ("text", "listops"):
        make_run(tmp_path / "runs" / task, task=task)
    page_of(tmp_path, tmp_path / "runs")
    figures = tmp_path / "out" / "report-figures"
    assert (figures / "curves-B.svg").exists()
    for mine in ("mine.svg", "curves-A.png"):
        (figures / mine).write_text("<svg/>")
    page_of(tmp_path, tmp_path / "runs" / "text")
    files = {path.name for path in figures.iterdir()}
    assert files == {"bubbles-A.svg", "curves-A.svg", "memory-by-task.svg", "mine.svg", "curves-A.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "report-figures"}


def test_the_command_is_typed_as_a_user_would():
    options = tyro.cli(Report, args=["runs", "more", "--out", "x.html", "--title", "T", "--bench", "b.json"])
    assert [str(path) for path in options.runs] == ["runs", "more"]
    assert (str(options.out), options.title, str(options.bench), options.analysis) == ("x.html", "T", "b.json", None)


def test_hostile_names_are_text(tmp_path):
    page = page_of(tmp_path, hostile(tmp_path), title=ATTACK)
    elements = Elements(page)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert "&lt;script&gt;window.hacked = 1&lt;/script&gt;" in page


def test_names_are_not_formulas(tmp_path):
    for number, name in enumerate(("$x$", r"$\frac", "_hidden", "\u6ce8\u610f", "{% raw %}{{ 7 * 7 }}")):
        run = make_run(tmp_path / "runs" / str(number))
        edit(run / "config.json", attention={"name": name})
    page = page_of(tmp_path, tmp_path / "runs")
    for name in ("$x$", r"$\frac", "_hidden", "\u6ce8\u610f", "{{ 7 * 7 }}"):
        assert page.count(name) >= 3  # in the tables and in the figures


def test_several_may_be_best(tmp_path):
    for name, accuracy in (("softmax", 1.0), ("gmm-rks", 1.0), ("performer", 0.999)):
        make_run(tmp_path / name, name, task="sparsity", accuracy=accuracy)
    assert "best here: softmax and 1 with the same" in text_of(page_of(tmp_path, tmp_path))


def test_all_of_the_best_are_bold(tmp_path):
    for name, accuracy in (("softmax", 0.9), ("gmm-rks", 0.90004), ("performer", 0.6)):
        make_run(tmp_path / name, name, accuracy=accuracy)
    settings = make_settings(collect([tmp_path]).runs)
    rows = lra_table(settings).rows
    assert {row[0].note for row in rows if row[5].best} == {"softmax", "gmm-rks"}
    assert {row[0].text for row in setting_table(settings[0]).rows if row[3].best} == {"softmax", "gmm-rks"}
    alone = make_settings(collect([tmp_path / "softmax"]).runs)
    assert not any(row[5].best for row in lra_table(alone).rows)


def test_what_may_be_chance_is_not_bold(tmp_path):
    for name, accuracy in (("softmax", 0.16), ("gmm-rks", 0.1425)):
        make_run(tmp_path / name, name, accuracy=accuracy)
    (setting,) = make_settings(collect([tmp_path]).runs)
    assert not any(row[3].best for row in setting_table(setting).rows)
    assert "; 50 test examples." in text_of(page_of(tmp_path, tmp_path))


def test_runs_behind_links_are_found_once(tmp_path):
    make_run(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    assert [run.name for run in collect([tmp_path / "runs"]).runs] == ["a"]
