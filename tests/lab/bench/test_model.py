"""The benchmark of whole models: a step is the paper's, rounds are interleaved, limits are kept and said."""

import json
import re

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from klformer.lab.bench import measure
from klformer.lab.bench.model import command
from klformer.lab.bench.model import step as step_module
from klformer.lab.bench.model.command import CPU_BATCH_SIZES, GIBIBYTE, PAPER_ATTENTIONS, ModelBench
from klformer.lab.bench.model.step import (
    MATERIALISED,
    ModelStep,
    Seconds,
    configuration,
    measure_in_own_process,
    measure_step,
)
from klformer.lab.cli.main import main
from klformer.lab.tasks import TASKS
from klformer.memory import MEBIBYTE

SECONDS = {"softmax": [1.0, 2.0, 4.0], "fastfood-prf": [0.5, 0.5, 4.0]}


class Processes:
    """Stands in for measurements: seconds of each round as given, memory by a rule."""

    def __init__(self, memory=lambda step: 2 * MEBIBYTE, fails=()):
        self.steps = []
        self.memory = memory
        self.fails = fails

    def timed(self):
        return [step for step in self.steps if step.steps]

    def __call__(self, step):
        self.steps.append(step)
        if step.attention in self.fails or (step.attention, step.batch_size) in self.fails:
            raise RuntimeError("killed by SIGKILL, most likely for want of memory")
        if step.steps == 0:
            return self.memory(step)
        number = sum(earlier == step for earlier in self.steps) - 1
        wall = SECONDS.get(step.attention, [1.0] * 9)[number]
        return Seconds(wall, processor=2 * wall if step.attention == "softmax" else wall)


@pytest.fixture
def fake(monkeypatch):
    def install(**arguments):
        processes = Processes(**arguments)
        monkeypatch.setattr(command, "measure_in_own_process", processes)
        return processes

    return install


def speed_bench(**changes):
    return ModelBench(**{"attentions": ("softmax", "fastfood-prf"), "lengths": (), "device": "cpu", **changes})


def length_bench(**changes):
    return ModelBench(**{"tasks": (), "repeats": 1, "device": "cpu", **changes})


class Operators(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", [MATERIALISED, *PAPER_ATTENTIONS])
def test_a_step_of_every_attention_can_be_measured(attention):
    assert min(measure_step(ModelStep("image", attention, batch_size=2, length=8, steps=1, device="cpu"))) > 0
    assert measure_step(ModelStep("image", attention, batch_size=2, length=8, steps=0, device="cpu")) >= 0


@pytest.mark.parametrize("task", CPU_BATCH_SIZES)
def test_models_are_those_of_the_papers_tables(task):
    config = configuration(ModelStep(task, "fastfood-prf", 2, length=8, steps=1, device="cpu"))
    assert config.preset == "paper"
    fastfood = TASKS[task].presets["paper"]["attention"]["fastfood-prf"]
    assert config.attention.options["num_frequencies"] == fastfood["num_frequencies"]
    assert config.data.max_len == 8
    measure_step(ModelStep(task, "fastfood-prf", 1, length=8, steps=1, device="cpu"))


@pytest.mark.parametrize(("preset", "batch"), [("laptop", 32), ("workstation", 16)])
def test_models_are_those_of_another_preset_where_asked_for(capsys, preset, batch):
    arguments = ["--tasks", "text", "--attentions", "softmax", "--lengths", "--repeats", "1", "--steps", "1"]
    main(["bench", "model", "--preset", preset, *arguments, "--max-len", "8", "--batch-size", "2"])
    out = capsys.readouterr().out
    assert f"2 sequences (in preset {preset} {batch}) of 8 tokens" in out
    assert "default allocator" in out


@pytest.mark.parametrize(("pooling", "expected"), [(None, "mean"), ("cls", "cls")])
def test_the_classifier_may_see_something_else(pooling, expected):
    step = ModelStep("text", "softmax", 1, length=8, steps=0, device="cpu", preset="laptop", pooling=pooling)
    assert configuration(step).model.pooling == expected


def test_scores_are_written_out_where_asked_for():
    names = {}
    for attention in ("softmax", MATERIALISED):
        with Operators() as operators:
            measure_step(ModelStep("text", attention, batch_size=1, length=8, steps=1, device="cpu"))
        names[attention] = {name for name in operators.names if "softmax" in name and "log" not in name}
    assert not names["softmax"]
    assert names[MATERIALISED]


def test_memory_is_the_same_every_time():
    # 512 tokens of 2 KiB a layer: much of it in blocks that the allocator would keep by default.
    step = ModelStep("text", "fastfood-prf", batch_size=1, length=512, steps=0, device="cpu")
    first, second = measure_in_own_process(step), measure_in_own_process(step)
    assert abs(first - second) < 0.05 * first


def test_time_is_measured_in_a_process_that_may_keep_its_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(step_module, "in_own_process", lambda *call, environment: asked.append((call, environment)))
    steps = [ModelStep("image", "fastfood-prf", batch_size=1, length=8, steps=count, device="cpu") for count in (1, 0)]
    for step in steps:
        measure_in_own_process(step)
    assert asked == [((measure_step, steps[0]), {}), ((measure_step, steps[1]), measure.GIVE_MEMORY_BACK)]


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"exit code 1: .*sofmax"):
        measure_in_own_process(ModelStep("image", "sofmax", batch_size=1, length=8, steps=1, device="cpu"))


def test_speed_is_relative_to_softmax_of_the_same_round(fake, tmp_path, capsys):
    processes = fake()
    command.run(speed_bench(tasks=("text", "image"), out=tmp_path))
    text = [step for step in processes.timed() if step.task == "text"]
    assert [step.attention for step in text] == ["softmax", "fastfood-prf"] * 3
    assert {(step.batch_size, step.length) for step in text} == {(4, 4000)}
    report = json.loads((tmp_path / "model.json").read_text())
    assert [(row["task"], row["attention"]) for row in report["speed"]] == [
        (task, name) for task in ("text", "image") for name in ("softmax", "fastfood-prf")
    ]
    assert report["command"]
    row = report["speed"][1]
    assert row["relative"] == {"median": 2.0, "low": 1.0, "high": 4.0}
    assert row["relative_processor"] == {"median": 4.0, "low": 2.0, "high": 8.0}
    assert row["steps_per_second"] == {"median": 2.0, "low": 0.25, "high": 2.0}
    assert row["memory"] == 2 * MEBIBYTE
    assert report["speed"][0]["relative"]["high"] == 1
    out = capsys.readouterr().out
    assert "4 sequences (in the paper 32; limited to 4 on the CPU) of 4,000 tokens" in out
    assert "2.00 (1.00 to 4.00)" in out
    assert re.search(r"fastfood-prf .*│ +2 │", out)
    assert (tmp_path / "model.png").stat().st_size > 1000
    assert "fastfood-prf" in (tmp_path / "model.svg").read_text()
    assert not (tmp_path / "model-length.png").exists()


def test_batches_can_be_the_papers(fake, capsys):
    processes = fake()
    command.run(speed_bench(tasks=("retrieval", "image"), batch_size="paper", max_len=64))
    assert {(step.task, step.batch_size, step.length) for step in processes.steps} == {
        ("retrieval", 2, 64),
        ("image", 256, 64),
    }
    assert "2 pairs of sequences, as in the paper, of 64 tokens" in capsys.readouterr().out


def in_gibibytes(fixed, softmax, fastfood):
    """A rule of memory: so much for a step, and so much for each example of it."""
    slopes = {"softmax": softmax, "fastfood-prf": fastfood}
    return lambda step: (fixed + slopes[step.attention] * step.batch_size) * GIBIBYTE


@pytest.mark.parametrize(
    ("memory", "fails", "options", "size", "note"),
    [
        (in_gibibytes(0, 0.1, 0.3), (), {}, 32, ", as in the paper,"),
        (in_gibibytes(1, 0.1, 0.5), (), {}, 16, " (in the paper 32; 16 fits 12 GiB)"),
        (in_gibibytes(1, 0.1, 0.5), (), {"memory_limit": 4.5}, 4, " (in the paper 32; 4 fits 4.5 GiB)"),
        (in_gibibytes(10, 1, 2), (), {}, 1, " (in the paper 32; 1 fits 12 GiB)"),
        (in_gibibytes(99, 1, 1), (), {}, 1, " (in the paper 32; 1 is above 12 GiB)"),
        (in_gibibytes(0, 0.1, 0.3), [("fastfood-prf", 32)], {}, 16, " (in the paper 32; 16 fits 12 GiB)"),
        (in_gibibytes(0, 0.1, 0.3), (), {"max_batch_size": 6}, 6, " (in the paper 32; limited to 6)"),
        (in_gibibytes(0, 0.1, 3.0), (), {"max_batch_size": 6}, 3, " (in the paper 32; 3 fits 12 GiB)"),
        (in_gibibytes(0, 0.1, 3.0), ("fastfood-prf",), {}, 32, ", as in the paper,"),
        (in_gibibytes(0, 0.1, 3.0), (), {"batch_size": 32}, 32, ", as in the paper,"),
        (in_gibibytes(0, 0.1, 3.0), (), {"batch_size": 7}, 7, " (in the paper 32)"),
        (in_gibibytes(0, 0.1, 0.3), (), {"device": "cpu"}, 4, " (in the paper 32; limited to 4 on the CPU)"),
    ],
)
def test_batches_are_the_papers_where_they_fit(fake, monkeypatch, tmp_path, capsys, memory, fails, options, size, note):
    monkeypatch.setattr(command.torch.cuda, "get_device_name", lambda: "a GPU")
    processes = fake(memory=memory, fails=fails)
    command.run(speed_bench(**{"tasks": ("text",), "device": "cuda", "out": tmp_path, **options}))
    assert {step.batch_size for step in processes.timed()} == {size}
    assert f"{size} sequence{'' if size == 1 else 's'}{note} of" in capsys.readouterr().out
    rows = json.loads((tmp_path / "model.json").read_text())["speed"]
    assert {row["batch_note"] for row in rows} == {note.partition("; ")[2].removesuffix(")")}


def test_a_batch_that_does_not_fit_is_not_tried(fake):
    processes = fake(memory=in_gibibytes(1, 0.1, 0.5))
    command.run(speed_bench(tasks=("text",), max_batch_size=32))
    taken = [(step.attention, step.batch_size) for step in processes.steps if step.steps == 0]
    probes = [("softmax", 1), ("fastfood-prf", 1), ("fastfood-prf", 2), ("fastfood-prf", 16)]
    assert taken == [*probes, ("softmax", 16), ("fastfood-prf", 16)]


def test_what_fails_is_left_out_and_said(fake, tmp_path, capsys):
    processes = fake(fails=("softmax",))
    command.run(speed_bench(tasks=("listops",), out=tmp_path))
    assert "softmax" not in {step.attention for step in processes.timed()}
    first, second = json.loads((tmp_path / "model.json").read_text())["speed"]
    assert first["not_run"] == "killed by SIGKILL, most likely for want of memory"
    assert second["not_run"] is None
    assert second["relative"] is None
    out = capsys.readouterr().out
    assert "killed by SIGKILL" in out
    assert "not run" in out


def test_lengths_go_up_to_the_limits(fake, tmp_path, capsys):
    def memory(step):
        return step.length * (step.length if step.attention == MATERIALISED else 1024) * 1024 // 2

    processes = fake(memory=memory)
    names = (MATERIALISED, "softmax", "gmm-rks")
    lengths = (2048, 1024, 4096, 8192)  # gmm-rks takes 4 GiB at 8,192; softmax-materialised 2 at 2,048 and 8 at 4,096
    command.run(length_bench(length_attentions=names, lengths=lengths, memory_limit=4.0, out=tmp_path))
    ran = {name: [step.length for step in processes.steps if step.attention == name] for name in names}
    assert ran == {MATERIALISED: [1024, 2048], "softmax": [1024, 2048, 4096], "gmm-rks": [1024, 2048, 4096, 8192]}
    assert {(step.task, step.batch_size) for step in processes.steps} == {("text", 1)}
    rows = json.loads((tmp_path / "model.json").read_text())["length"]
    reasons = {(row["attention"], row["length"]): row["not_run"] for row in rows}
    assert reasons[MATERIALISED, 4096] == "above the limit of 4 GiB from 4,096 tokens on: about 8 GiB"
    assert reasons["softmax", 8192] == "quadratic, above 4,096 tokens"
    assert reasons["gmm-rks", 8192] is None
    last = next(row for row in rows if (row["attention"], row["length"]) == ("gmm-rks", 8192))
    assert last["memory"] == 4 * GIBIBYTE
    out = capsys.readouterr().out
    assert "4,096" in out
    assert "about 8 GiB" in out
    assert (tmp_path / "model-length.png").stat().st_size > 1000
    assert MATERIALISED in (tmp_path / "model-length.svg").read_text()
    assert not (tmp_path / "model.png").exists()


def test_what_failed_is_not_tried_at_greater_lengths(fake):
    processes = fake(fails=("gmm-rks",))
    command.run(length_bench(length_attentions=("gmm-rks",), lengths=(64, 128)))
    assert [step.length for step in processes.steps] == [64]


def test_the_command_is_in_the_group(fake, capsys):
    processes = fake()
    arguments = ["--tasks", "image", "--attentions", "softmax", "--batch-size", "3", "--lengths", "--repeats", "1"]
    main(["bench", "model", *arguments, "--device", "cpu"])
    assert {(step.task, step.batch_size) for step in processes.steps} == {("image", 3)}
    assert "3 sequences (in the paper 256)" in capsys.readouterr().out
    main(["bench", "model", "--tasks", "--lengths", "64", "--length-attentions", "softmax", "--repeats", "1"])
    assert processes.steps[-1].length == 64


def test_bad_options_are_named():
    with pytest.raises(ValueError, match=r"tasks must be one of .* got 'txt'; did you mean 'text'"):
        command.run(speed_bench(tasks=("txt",)))
    with pytest.raises(ValueError, match=r"unknown attention 'sofmax'"):
        command.run(speed_bench(attentions=("sofmax",)))
    with pytest.raises(ValueError, match=r"repeats must be at least 1, got 0"):
        command.run(speed_bench(repeats=0))
    for option in ("batch_size", "max_batch_size"):
        with pytest.raises(ValueError, match=rf"{option} must be at least 1, got 0"):
            command.run(speed_bench(**{option: 0}))
