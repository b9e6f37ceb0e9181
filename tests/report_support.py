"""Shared by the tests of the report: what runs, analyses and benchmarks leave on disk, the page, and a real browser."""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from klformer.lab.analysis.output import write_results
from klformer.lab.bench import peers
from klformer.lab.bench.attention import summarise
from klformer.lab.bench.measure import spread
from klformer.lab.bench.model import command as bench_model
from klformer.lab.bench.model.step import MATERIALISED, Seconds
from klformer.lab.cli import report as command
from klformer.lab.cli.report import Report
from klformer.lab.runs.config import preset
from klformer.memory import MEBIBYTE
from klformer.models import AttentionSpec

ATTACK = '<script>window.hacked = 1</script>"><img src=x onerror="window.hacked = 1">'


ACCURACY = {"name": "accuracy", "higher_is_better": True, "percent": True}
MSE = {"name": "mse", "higher_is_better": False, "percent": False}
#: What the tasks of the library say of themselves: title and accuracy of guessing.
TASKS = {
    "listops": ("ListOps", 0.1),
    "text": ("Text", 0.5),
    "retrieval": ("Retrieval", 0.5),
    "image": ("Image", 0.1),
    "sparsity": ("Sparsity", 1 / 9),
}


def describe_task(task, data, *, metric=ACCURACY, **changes):
    """What is in task.json; the sparsity task has its p in the label, and what is not known has its name as title."""
    title, chance = TASKS.get(task, (task, None))
    label = f"{title} {data['sparsity']}" if task == "sparsity" else title
    return {"name": task, "title": title, "label": label, "chance": chance, "metric": metric} | changes


def make_run(
    folder,
    attention="gmm-rks",
    *,
    task="text",
    preset_name="laptop",
    seed=0,
    accuracy=0.625,
    validation=None,
    finished=True,
    metric=ACCURACY,
    about=None,
    **changes,
):
    """A run's folder as `klformer train` leaves it.

    Args:
        accuracy: The score on the test set, of whatever metric.
        validation: That on the validation set, if it is another.
        about: Changes in task.json, like {"chance": 0.2}.
        changes: Changes in the configuration, like training={...}.
    """
    known = task if task in TASKS else "text"
    config = preset(preset_name, known, AttentionSpec.parse(attention)).model_dump(mode="json")
    config = {"format": 2} | config | {"task": task, "seed": seed}
    for section, values in changes.items():
        config[section] = config[section] | values
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    description = describe_task(task, config["data"], metric=metric, **(about or {}))
    (folder / "task.json").write_text(json.dumps(description))
    name = metric["name"]
    lines = [{"kind": "train", "step": 10 * n, "loss": 1.0, "tokens_per_second": 1000.0 + seed} for n in (1, 2, 3)]
    lines += [{"kind": "validation", "step": 10 * n, "loss": 1.0, name: 0.2 * n, "seconds": n} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    score = {"num_examples": 50, "draws": 10, "loss": 0.5}
    score |= {name: accuracy, f"{name}_std": 0.01, f"{name}_by_draw": [accuracy] * 10}
    score |= {"voting_accuracy": 0.75} if metric == ACCURACY else {}
    result = {
        "name": folder.name, "task": task, "attention": attention, "preset": preset_name, "seed": seed,
        "metric": name,
        "protocol": "validation on 10% of the training set (protocol holdout); test set used once, at the end",
        "parameters": 1234, "steps": 30, "best_step": 20, "first_reached": {}, "train_seconds": 90.0,
        "train_tokens": 1000, "tokens_per_second": 11.0, "peak_memory_bytes": 300 * 2**20,
        "kernel_moved": 0.37, "kernel_frequencies_moved": 0.41,
        "environment": {"torch": "9.9.9", "device": "cpu"}, "test": score,
        "validation": score | {name: accuracy if validation is None else validation},
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
    seconds = {"softmax": lambda length: length**2 / 128e6, "gmm-rks": lambda length: length / 1e6}
    rows = [
        {"name": name, "length": length, "seconds": spread([times(length)] * 3), "memory": length * 1000}
        for name, times in seconds.items()
        for length in (64, 128, 256)
    ]
    sizes = {"length": 0, "batch": 1, "heads": 2, "head_dim": 8, "num_frequencies": 128}
    content = {"environment": {"date": "2026", "machine": machine}, "sizes": sizes, "results": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"summary": summarise(rows)}))


#: Seconds of a faked step, round by round.
STEP_SECONDS = {"softmax": [1.0, 2.0, 4.0], "fastfood-prf": [0.5, 0.5, 4.0]}


def write_models(folder, *, fails=(), **options):
    """model.json as `klformer bench model` writes it, with measurements made up."""
    done = []

    def measure(step):
        done.append(step)
        if (step.task, step.attention) in fails:
            raise RuntimeError("killed by SIGKILL")
        if step.steps:
            wall = STEP_SECONDS.get(step.attention, [0.25, 0.5, 1.0])[done.count(step) - 1]
            return Seconds(wall, processor=2 * wall)
        growth = step.length if step.attention == MATERIALISED else 1024
        return step.length * growth * step.batch_size * 512

    chosen = {"attentions": ("softmax", "gmm-rks", "fastfood-prf"), "lengths": (1024, 2048, 4096, 8192)}
    chosen |= {"length_attentions": (MATERIALISED, "softmax", "gmm-rks"), "device": "cpu", "out": folder}
    chosen |= {"memory_limit": 20.0}  # more than any step takes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_model, "measure_in_own_process", measure)
        bench_model.run(bench_model.ModelBench(**(chosen | options)))
    return folder / "model.json"


def write_peers(folder, **options):
    """peers.json as `klformer bench peers` writes it: results are compared, time and memory are made up."""
    seconds = {"klformer": [1.0, 2.0, 4.0], "torch": [3.0, 4.0], "materialised": [0.5, 2.0, 8.0]}
    memory = {"klformer": (2, 1, 4), "torch": (1, 1, 1), "materialised": (5, 5, 6)}
    done = []

    def measure_memory(run, contender, *shape):
        done.append(contender)
        return memory[contender.maker][done.count(contender) - 1] * MEBIBYTE

    chosen = {"attentions": ("softmax", "gmm-rks"), "encoder_attentions": ("softmax", "gmm-rks"), "lengths": (13,)}
    chosen |= {
        "heads": 2,
        "head_dim": 4,
        "num_frequencies": 6,
        "num_layers": 1,
        "repeats": 3,
        "memory_repeats": 3,
        "kept": False,
        "out": folder,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "both_times", lambda subjects, **_: {c: (seconds[c.maker],) * 2 for c in subjects})
        patch.setattr(peers, "in_own_process", measure_memory)
        peers.run(peers.PeersBench(**(chosen | options)))
    return folder / "peers.json"


def hostile_benchmarks(folder):
    """A model.json and a peers.json in which every text is an attack."""
    models, compared = write_models(folder), write_peers(folder)
    for path, lists in ((models, ("speed", "length")), (compared, ("comparisons", "subjects"))):
        content = json.loads(path.read_text())
        content["environment"] = {"date": ATTACK, "machine": ATTACK}
        for row in (row for key in lists for row in content[key]):
            texts = {"task", "attention", "peer", "klformer", "name", "not_run", "batch_note"} & row.keys()
            row |= {key: ATTACK for key in texts if key != "not_run" or row[key] is not None}
        edit(path, **(content | ({"sizes": {"heads": ATTACK}} if "sizes" in content else {})))


def page_of(tmp_path, *folders, **options):
    target = tmp_path / "out" / "report.html"
    command.report_runs(Report(runs=folders, out=target, **options))
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


def hostile(tmp_path):
    """A folder in which every text that reaches the page is an attack."""
    runs = tmp_path / "hostile"
    run = make_run(runs / "<script>window.hacked = 1<")  # a name can't have a slash
    attention = {"name": ATTACK, "options": {ATTACK: ATTACK}}
    edit(run / "config.json", preset=ATTACK, attention=attention, **{ATTACK: ATTACK})
    edit(run / "result.json", protocol=ATTACK, environment={ATTACK: ATTACK})
    other = make_run(runs / "other", "softmax")
    edit(other / "config.json", task=ATTACK, preset=ATTACK)
    hostile_metric = {"name": ATTACK, "higher_is_better": True, "percent": True}
    edit(other / "task.json", name=ATTACK, title=ATTACK, label=ATTACK, metric=hostile_metric)
    score = json.loads((other / "result.json").read_text())["test"] | {ATTACK: 0.5}
    edit(other / "result.json", metric=ATTACK, test=score)
    write_analyses(runs, attention=ATTACK, caption=ATTACK)
    write_benchmark(runs / "attention.json", machine=ATTACK)
    content = json.loads((runs / "attention.json").read_text())
    content["results"][0]["name"] = ATTACK
    edit(runs / "attention.json", results=content["results"], sizes={"heads": ATTACK})
    hostile_benchmarks(runs)
    return runs
