"""The report: the paper's figures, what is read and refused, and the page in a real browser."""

import base64
import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import tyro

from klformer.attention import attention_names
from klformer.experiments.analyze.output import write_results
from klformer.experiments.config import AttentionConfig
from klformer.experiments.presets import LAPTOP, preset
from klformer.experiments.report import command
from klformer.experiments.report.collect import collect
from klformer.experiments.report.command import Report
from klformer.experiments.report.paper_numbers import EIGENVALUES, ERRATA, GLUE, GLUE_COLUMNS, LRA, RANDOM
from klformer.experiments.report.settings import make_settings
from klformer.experiments.report.tables import benchmark_table, glue_task, lra_table

ATTACK = '<script>window.hacked = 1</script>"><img src=x onerror="window.hacked = 1">'


def make_run(
    folder, attention="gmm-rks", *, task="text", preset_name="laptop", seed=0, accuracy=0.625, finished=True, **changes
):
    """A run's folder as `klformer train` leaves it; `changes` go into the configuration, like training={...}."""
    known = task if task in ("listops", "text", "retrieval", "image", "sparsity") else "text"
    config = preset(preset_name, known, AttentionConfig.parse(attention)).model_dump(mode="json")
    config |= {"task": task, "seed": seed}
    for section, values in changes.items():
        config[section] = config[section] | values
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"kind": "train", "step": 10 * n, "loss": 1.0, "tokens_per_second": 1000.0 + seed} for n in (1, 2, 3)]
    lines += [{"kind": "validation", "step": 10 * n, "loss": 1.0, "accuracy": 0.2 * n} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    score = {"num_examples": 50, "loss": 0.5, "accuracy": accuracy, "accuracy_std": 0.01, "voting_accuracy": 0.75}
    score |= {"draws": 10, "accuracies": [accuracy] * 10}
    result = {
        "name": folder.name, "task": task, "attention": attention, "preset": preset_name, "seed": seed,
        "protocol": "validation on 10% of the training set (protocol holdout); test set untouched",
        "parameters": 1234, "steps": 30, "best_step": 20, "first_reached": {}, "train_seconds": 90.0,
        "train_tokens": 1000, "tokens_per_second": 11.0, "peak_memory_bytes": 300 * 2**20,
        "environment": {"torch": "9.9.9", "device": "cpu"}, "validation": score, "test": score,
    }  # fmt: skip
    if finished:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_analyses(folder, attention="gmm-rks", caption="Ten draws."):
    run = {"run": "text-run", "attention": attention}
    measures = {"rsd": 0.123, "pi": 4.5, "agv": 1.02, "voting_accuracy": 0.66, "accuracy": 0.65}
    write_results(folder, "variance", caption=caption, rows=[run | {"task": "text"} | measures], settings={})
    values = {"minimum": 1e-6, "maximum": 0.777, "mean": 0.05}
    heads = [
        run | {"layer": layer, "head": head} | values | {f"initial_{key}": value / 2 for key, value in values.items()}
        for layer in (1, 2)
        for head in (1, 2)
    ]
    write_results(folder, "eigenvalues", caption=caption, rows=heads, settings={})


def write_benchmark(path, machine="a machine"):
    rows = [
        {"name": name, "length": length, "seconds": length / 1e6, "memory": length * 1000}
        for name in ("softmax", "gmm-rks")
        for length in (64, 128, 256)
    ]
    sizes = {"length": 0, "batch": 1, "heads": 2, "head_dim": 8, "num_frequencies": 128}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": {"date": "2026", "machine": machine}, "sizes": sizes, "results": rows}))


def page_of(tmp_path, *folders, **options):
    target = tmp_path / "out" / "report.html"
    command.run(Report(runs=folders, out=target, **options))
    return target.read_text()


def text_of(page):
    """What a reader sees, without tags."""
    page = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


class Elements(HTMLParser):
    """All elements with their attributes, and the balance of the tags."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_averages_of_the_lra_table_and_their_misprint():
    wrong = [row.attention for row in LRA if row.average_is_misprinted()]
    assert wrong == ["linformer"]
    linformer = next(row for row in LRA if row.attention == "linformer")
    assert linformer.average == 52.56
    assert round(linformer.row_average(), 2) == 47.08
    assert "52.56" in ERRATA["linformer-average"]
    assert "47.08" in ERRATA["linformer-average"]
    assert not RANDOM.average_is_misprinted()


def test_the_papers_models_are_this_librarys_attentions():
    assert {row.attention for row in LRA} <= set(attention_names())
    assert set(GLUE) <= set(attention_names())
    assert len({row.attention for row in LRA}) == len(LRA) == 17
    assert all(len(row) == len(GLUE_COLUMNS) for row in GLUE.values())


def test_the_best_of_the_paper_are_those_that_it_prints_in_bold():
    best = {task: max(LRA, key=lambda row: row.accuracy(task)).attention for task in ("listops", "text", "retrieval")}
    assert best == {"listops": "generative-prf", "text": "generative-rks", "retrieval": "fastfood-prf"}
    assert max(LRA, key=lambda row: row.row_average()).attention == "fastfood-prf"


@pytest.mark.parametrize("table", EIGENVALUES, ids=lambda table: f"{table.task}-{table.attention}")
def test_eigenvalue_summaries_follow_from_the_heads_but_for_one_misprint(table):
    assert len(table.heads) == 12  # three layers of four heads
    assert all(low < mean < high for low, high, mean in table.heads)
    assert table.mean() == pytest.approx(table.printed_mean, abs=0.0006)
    if (table.task, table.attention) == ("retrieval", "gmm-prf"):
        assert table.printed_maximum == 0.186
        assert round(table.maximum(), 3) == 0.211
        assert "0.211" in ERRATA["eigenvalue-maximum"]
    else:
        assert table.maximum() == pytest.approx(table.printed_maximum, abs=0.001)


def test_the_page_has_the_runs_beside_the_paper(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a", "gmm-rks", accuracy=0.625)
    make_run(tmp_path / "runs" / "b", "softmax", accuracy=0.5)
    page = page_of(tmp_path, tmp_path / "runs")
    text = text_of(page)
    assert "62.50 A" in text
    assert "63.95" in text  # the paper's
    steps = LAPTOP["text"]["training"]["max_steps"]
    assert f"{steps:,} steps of 32 sequences of at most 512 tokens" in text
    assert "20,000 steps of 32 sequences of at most 4,000 tokens" in text
    assert "47.08 printed 52.56" in text
    assert "torch 9.9.9" in text
    assert "validation on 10% of the training set (protocol holdout)" in text.lower()
    assert "runs: 2 finished, 0 unfinished" in capsys.readouterr().out


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
    page_of(tmp_path, tmp_path / "runs")
    files = {path.name for path in (tmp_path / "out" / "report-figures").iterdir()}
    assert files == {
        *(f"{kind}-{letter}.svg" for kind in ("curves", "bubbles") for letter in "ABC"),
        "bubbles-average.svg",
        "memory-by-task.svg",
        "memory-against-length.svg",
        "seconds-against-length.svg",
        "variance-text.svg",
    }
    for name in files:
        ElementTree.parse(tmp_path / "out" / "report-figures" / name)


def test_analyses_are_found_beside_the_runs_or_where_one_says(tmp_path):
    make_run(tmp_path / "runs" / "text-run")
    write_analyses(tmp_path / "elsewhere")
    write_benchmark(tmp_path / "bench" / "attention.json", machine="a certain machine")
    nothing = text_of(page_of(tmp_path, tmp_path / "runs"))
    for what in ("variance of predictions over draws", "eigenvalues of these runs", "memory against length"):
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
        assert "Missing: memory against length" not in text


def test_a_benchmark_is_shown_in_numbers(tmp_path):
    write_benchmark(tmp_path / "attention.json")
    rows = json.loads((tmp_path / "attention.json").read_text())["results"]
    rows[0] |= {"memory": None}
    rows[1] |= {"memory": 5 * 2**20, "seconds": 0.012}
    edit(tmp_path / "attention.json", results=rows[:-1])
    (benchmark,) = collect([tmp_path]).benchmarks
    softmax, gmm = benchmark_table(benchmark, 0).rows
    assert [cell.text for cell in softmax] == ["softmax", "\N{EN DASH}", "5.0", "0.2", "0.1", "12.0", "0.3"]
    assert [cell.sort is None for cell in gmm] == [False, False, False, True, False, False, True]


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
    text = text_of(page_of(tmp_path, run))
    assert "nan" not in text.lower().split()
    assert "unfinished A" in text


def test_seeds_are_averaged(tmp_path):
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        make_run(tmp_path / f"s{seed}", seed=seed, accuracy=accuracy)
    (setting,) = make_settings(collect([tmp_path]).runs)
    (group,) = setting.groups
    assert group.accuracy() == pytest.approx(60)
    assert group.spread() == (pytest.approx(10), "3 seeds")
    assert group.speed() == 1001


def test_only_equal_settings_are_compared(tmp_path):
    make_run(tmp_path / "a", "gmm-rks")
    make_run(tmp_path / "b", "softmax", training={"log_every": 77})  # changes no result
    make_run(tmp_path / "c", "softmax", training={"max_steps": 7})
    make_run(tmp_path / "d", "softmax", task="sparsity", data={"sparsity": 0.1})
    settings = make_settings(collect([tmp_path]).runs)
    assert [(s.letter, s.task, len(s.runs)) for s in settings] == [
        ("A", "text", 2),
        ("B", "text", 1),
        ("C", "sparsity 0.1", 1),
    ]
    assert settings[1].difference == ("training.max_steps = 7",)
    rows = [row for row in lra_table(settings).rows if row[0].note == "softmax" or row[0].text == "softmax"]
    assert [row[5].note for row in rows] == ["A", "B"]  # one row a setting, none of them averaged


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
        return next(row for row in rows if row[0].note == "gmm-rks")[-1].sort

    make_run(tmp_path / "a", task="listops", accuracy=0.2)
    make_run(tmp_path / "b", task="text", accuracy=0.3)
    assert average() is None
    make_run(tmp_path / "c", task="retrieval", accuracy=0.7)
    assert average() == pytest.approx(40)


def test_glue_runs_stand_in_the_glue_table(tmp_path):
    make_run(tmp_path / "a", task="glue-sst2", accuracy=0.8125)
    page = page_of(tmp_path, tmp_path / "a")
    assert "0.81 A" in text_of(page)
    assert "Missing: runs of GLUE" not in text_of(page)
    assert [glue_task(name) for name in ("glue/sst-2", "CoLA", "mnli-mm", "text")] == ["sst2", "cola", "mnli-mm", None]


def test_a_folder_given_twice_counts_once(tmp_path):
    make_run(tmp_path / "runs" / "a")
    assert len(collect([tmp_path / "runs", tmp_path / "runs" / "a", tmp_path / "runs" / "." / "a"]).runs) == 1


def test_where_the_data_lay_is_not_published(tmp_path):
    make_run(tmp_path / "run", data={"root": "/a/private/place"})
    assert "private/place" not in page_of(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", r"config\.json is not JSON"),
        ("config.json", "[]", r"config\.json must hold an object"),
        ("config.json", "{}", r"config\.json is not a run's configuration: 'task' is missing"),
        ("config.json", '{"task": "text", "preset": "x", "attention": 3}', r"config\.json .* 'attention'"),
        ("config.json", b"\xff\xfe", r"can't read .*config\.json"),
        ("result.json", '{"test": ', r"result\.json is not JSON"),
        ("result.json", "{}", r"result\.json is damaged: it has no 'test'"),
        ("metrics.jsonl", '{"kind": \n{}\n', r"metrics\.jsonl is damaged"),
        ("metrics.jsonl", '{"kind": "train"}\n', r"metrics\.jsonl is damaged: a line has no step"),
        ("variance.json", '{"caption": "x"}', r"variance\.json has no list of rows"),
        ("variance.json", '{"rows": [{"run": "x"}]}', r"variance\.json: a row of rows has no 'attention'"),
        ("eigenvalues.json", "nonsense", r"eigenvalues\.json is not JSON"),
        ("attention.json", '{"results": 3}', r"attention\.json has no list of results"),
        ("attention.json", '{"results": [{"name": "a", "length": "b"}]}', r"attention\.json is not a benchmark"),
    ],
)
def test_what_is_broken_is_named(tmp_path, file, content, message):
    run = make_run(tmp_path / "runs" / "run")
    (run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        collect([tmp_path / "runs"])


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
        command.run(Report(runs=()))
    make_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't write .*report\.html"):
        command.run(Report(runs=(tmp_path / "run",), out=tmp_path / "file" / "report.html"))


def test_the_command_is_typed_as_a_user_would():
    options = tyro.cli(Report, args=["runs", "more", "--out", "x.html", "--title", "T", "--bench", "b.json"])
    assert [str(path) for path in options.runs] == ["runs", "more"]
    assert (str(options.out), options.title, str(options.bench), options.analysis) == ("x.html", "T", "b.json", None)


def hostile(tmp_path):
    """A folder in which every text that reaches the page is an attack."""
    runs = tmp_path / "hostile"
    run = make_run(runs / "<script>window.hacked = 1<")  # a name can't have a slash
    attention = {"name": ATTACK, "options": {ATTACK: ATTACK}}
    edit(run / "config.json", preset=ATTACK, attention=attention, **{ATTACK: ATTACK})
    edit(run / "result.json", protocol=ATTACK, environment={ATTACK: ATTACK})
    other = make_run(runs / "other", "softmax")
    edit(other / "config.json", task=ATTACK, preset=ATTACK)
    write_analyses(runs, attention=ATTACK, caption=ATTACK)
    write_benchmark(runs / "attention.json", machine=ATTACK)
    content = json.loads((runs / "attention.json").read_text())
    content["results"][0]["name"] = ATTACK
    edit(runs / "attention.json", results=content["results"], sizes={"heads": ATTACK})
    return runs


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


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
#: Chromium speaks its protocol over the file descriptors 3 and 4.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """A headless Chromium, driven through its DevTools pipe: messages are JSON with a zero byte at the end."""

    def __init__(self, profile):
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        inherited = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (there, back)]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, inherited), CHROMIUM, *flags, "--remote-debugging-pipe"],
            pass_fds=inherited,
            stderr=subprocess.DEVNULL,
        )
        for end in (there, back, *inherited):
            os.close(end)
        self._received, self._count, self._session = b"", 0, {}
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], 60)
            assert ready, "chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "chromium has gone"
            self._received += part
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)

    def open(self, path):
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self):
        """Messages on the console, errors of scripts, and what the page's policy refused."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in kinds]

    def close(self):
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with everything on it."""
    tmp_path = tmp_path_factory.mktemp("report")
    for number, name in enumerate(("softmax", "gmm-rks", "performer", "gmm-prf")):
        for task in ("listops", "text", "retrieval"):
            make_run(tmp_path / "runs" / f"{task}-{name}", name, task=task, accuracy=0.5 + 0.03 * number)
    make_run(tmp_path / "runs" / "text-elu", "linear-elu", finished=False)
    write_analyses(tmp_path / "runs" / "analysis")
    write_benchmark(tmp_path / "runs" / "bench" / "attention.json")
    page_of(tmp_path, tmp_path / "runs")
    return tmp_path / "out" / "report.html"


COLUMN = (
    "[...document.querySelector('#table-{}').tBodies[0].rows].map(row => row.cells[{}].firstChild.textContent.trim())"
)
CLICK = "document.querySelector('#table-{}').tHead.rows[1].cells[{}].querySelector('button').click()"


@needs_browser
def test_tables_sort_when_clicked(browser, report):
    browser.open(report)
    names, accuracies = COLUMN.format("setting-B", 0), COLUMN.format("setting-B", 3)
    assert browser.run(accuracies) == ["59.00", "56.00", "53.00", "50.00", "unfinished"]
    browser.run(CLICK.format("setting-B", 0))
    assert browser.run(names) == ["gmm-prf", "gmm-rks", "linear-elu", "performer", "softmax"]
    browser.run(CLICK.format("setting-B", 3))
    assert browser.run(accuracies) == ["59.00", "56.00", "53.00", "50.00", "unfinished"]
    assert browser.run("document.querySelectorAll('#table-setting-B [aria-sort=descending]').length") == 1
    browser.run(CLICK.format("setting-B", 3))
    assert browser.run(accuracies) == ["50.00", "53.00", "56.00", "59.00", "unfinished"]  # missing stays last
    browser.run(CLICK.format("lra", 2))
    assert browser.run(COLUMN.format("lra", 2))[:3] == ["37.42", "37.08", "37.05"]
    assert browser.complaints() == []


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")])
def test_the_page_fits_and_can_be_read(browser, report, width, scheme):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.call("Emulation.setEmulatedMedia", media="", features=[feature])
    browser.open(report)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("document.querySelectorAll('figure svg').length") == 11
    assert browser.run(
        "[...document.querySelectorAll('figure svg')].every(svg => svg.getBoundingClientRect().height > 100)"
    )
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(19, 23, 28)" if scheme == "dark" else "rgb(255, 255, 255)")
    # The ink of the figures is that of the page, and so is the ground.
    label = "[...document.querySelectorAll('figure svg text')].find(text => text.textContent == 'training step')"
    assert browser.run(f"getComputedStyle({label}).fill") == browser.run("getComputedStyle(document.body).color")
    assert browser.complaints() == []


@needs_browser
def test_everything_is_on_paper(browser, report):
    browser.open(report)
    opened = "document.querySelectorAll('details[open]').length"
    assert browser.run(opened) == 0
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(opened) == browser.run("document.querySelectorAll('details').length") > 10
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(opened) == 0
    assert base64.b64decode(browser.call("Page.printToPDF")["data"]).startswith(b"%PDF")
    assert browser.complaints() == []


@needs_browser
def test_hostile_names_do_nothing(browser, tmp_path):
    page_of(tmp_path, hostile(tmp_path), title=ATTACK)
    browser.open(tmp_path / "out" / "report.html")
    assert browser.run("typeof window.hacked") == "undefined"
    assert browser.run("document.title").startswith("<script>")
    assert browser.complaints() == []
    # Even a script that did get in would not run.
    browser.run("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    assert browser.run("typeof window.hacked") == "undefined"
