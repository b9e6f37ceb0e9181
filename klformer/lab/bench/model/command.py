"""`klformer bench model`: training speed and memory of whole models of the paper, as in its section on efficiency.

Two tables and figures. Speed: training steps per second relative to softmax, and peak memory, for each task of the
paper's tables at its full length. Length: peak memory of the Text model from 1K to 4K tokens, as in the paper, and on
to 64K for the attentions that are linear in the length.

Each measurement is a process of its own: the model and a step on short inputs to warm up, and then a step whose peak
memory is taken, or one more to warm up and steps that are timed. Rounds of the latter go over all attentions, so that a
slow minute of the machine hits all alike. Memory is the same every time, and taken once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from klformer.attention import build_attention
from klformer.checks import check_choice, check_count
from klformer.files import write_json
from klformer.lab.bench.measure import make_report, spread
from klformer.lab.bench.model.output import draw_length, draw_speed, length_table, speed_table
from klformer.lab.bench.model.step import MATERIALISED, ModelStep, Seconds, measure_in_own_process
from klformer.lab.environment import describe_machine
from klformer.lab.runs.config import preset_table
from klformer.lab.tasks import TASKS
from klformer.lab.terminal import make_console
from klformer.models import AttentionSpec

GIBIBYTE = 2**30
PAPER_ATTENTIONS = (
    *("softmax", "performer", "linear-elu", "gmm-rks", "fastfood-rks", "generative-rks"),
    *("gmm-prf", "fastfood-prf", "generative-prf"),
)
#: The paper's examples in a step, by task: those of its training, but 2 pairs for the memory of Retrieval.
PAPER_BATCH_SIZES = {
    task: preset_table("paper", task)["training"]["batch_size"] for task in ("text", "listops", "image")
} | {"retrieval": 2}
#: The most examples in a step on the CPU by default, by task: steps of seconds on a few cores.
CPU_BATCH_SIZES = {"text": 4, "retrieval": 2, "listops": 4, "image": 32}
LENGTH_TASK = "text"


@dataclass(frozen=True)
class Batch:
    """Examples in a step, and why they are not as many as the paper's; no reason if they are, or were asked for."""

    size: int
    note: str = ""


@dataclass(frozen=True)
class ModelBench:
    """Training steps per second relative to softmax, and peak memory, of the paper's models; memory against length.

    Inputs are random, no data is needed. Examples:

      klformer bench model --out bench
      klformer bench model --tasks text --attentions softmax gmm-rks fastfood-prf --batch-size paper --lengths
      klformer bench model --tasks --lengths 1024 2048 4096 --out bench
      klformer bench model --preset laptop --tasks text --lengths
    """

    tasks: tuple[str, ...] = tuple(CPU_BATCH_SIZES)
    """Tasks of the table of speed; none to leave it out."""
    preset: Literal["paper", "laptop", "workstation"] = "paper"
    """Whose models: the paper's, or those of another preset, with its batches and lengths."""
    pooling: Literal["cls", "mean"] | None = None
    """What the classifier sees: CLS, of which the last layer needs one query, or the mean. Default: the preset's."""
    attentions: tuple[str, ...] = PAPER_ATTENTIONS
    """Attentions, with options after a colon; softmax-materialised is softmax with its scores written out."""
    batch_size: int | Literal["paper"] | None = None
    """Examples in a step; "paper" for the paper's 32 (Retrieval: 2, Image: 256), whether it fits or not. Default: the
    paper's, but at most `--max-batch-size`, halved until a step of the most demanding attention fits
    `--memory-limit`."""
    max_batch_size: int | None = None
    """The most examples in a step by default. Default: on the CPU 4 (Retrieval: 2, Image: 32), on a GPU no limit."""
    max_len: int | None = None
    """Cut all tasks to this length, for a quick look. Default: the tasks' own."""
    lengths: tuple[int, ...] = (1024, 2048, 3072, 4096, 8192, 16384, 32768, 65536)
    """Lengths for the table of memory, of the Text model with one sequence; none to leave it out."""
    length_attentions: tuple[str, ...] = (MATERIALISED, *PAPER_ATTENTIONS)
    """Attentions of that table."""
    quadratic_up_to: int = 4096
    """Longest sequence for attentions that take time quadratic in the length."""
    memory_limit: float = 12.0
    """GiB that a step may take: for batches, and for lengths, of which one is left out if going on as from the length
    before it would take more."""
    steps: int = 3
    """Steps that are timed in a process."""
    repeats: int = 3
    """Rounds of timing, with a process each for every attention."""
    device: Literal["cpu", "cuda"] | None = None
    """Where to compute; the GPU if there is one."""
    out: Path | None = None
    """Folder for model.json, model.svg, model.png, model-length.svg and model-length.png."""


def run(options: ModelBench) -> None:
    """Measure, print the tables, and write the figures where they were asked for."""
    _check(options)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = make_console(136)
    environment = describe_machine()
    if device == "cuda":
        environment["device"] = torch.cuda.get_device_name()
    console.print(
        f"klformer model benchmark, {environment['date']}, {environment.get('device', environment['machine'])}"
    )
    report = make_report(environment, {"options": asdict(options), "speed": [], "length": []})
    for task in options.tasks:
        rows = _measure_task(options, task, device, console)
        report["speed"] += rows
        speed_table(rows).print(console)
    if options.lengths:
        report["length"] = _measure_lengths(options, device, console)
        length_table(report["length"]).print(console)
    if options.out is not None:
        write_json(options.out / "model.json", report)
        if report["speed"]:
            draw_speed(report, options.out / "model.svg", options.out / "model.png")
        if report["length"]:
            draw_length(report, options.out / "model-length.svg", options.out / "model-length.png")
        console.print(f"figures written to {options.out}")


def _check(options: ModelBench) -> None:
    for task in options.tasks:
        check_choice("tasks", task, CPU_BATCH_SIZES)
    for attention in (*options.attentions, *options.length_attentions):
        AttentionSpec.parse("softmax" if attention == MATERIALISED else attention)
    check_count("repeats", options.repeats)
    check_count("steps", options.steps)
    for option in ("batch_size", "max_batch_size"):
        value = getattr(options, option)
        if value not in (None, "paper"):
            check_count(option, value)


def _rounds(steps: Sequence[ModelStep], repeats: int, console: Console) -> dict[ModelStep, list[Any] | str]:
    """Return what every round found for each step, seconds or bytes, or why the first that failed did."""
    found: dict[ModelStep, list[Any] | str] = {step: [] for step in steps}
    for index in range(repeats):
        for step in steps:
            before = found[step]
            if isinstance(before, str):
                continue
            what = f"time, round {index + 1} of {repeats}" if step.steps else "memory"
            with console.status(f"{what}: {step.describe()}"):
                try:
                    before.append(measure_in_own_process(step))
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
                    found[step] = reason
                    console.print(f"{step.describe()}: {reason}", highlight=False, markup=False)
    return found


def _measure_task(
    options: ModelBench, task: str, device: Literal["cpu", "cuda"], console: Console
) -> list[dict[str, Any]]:
    """Measure one task: a row for each attention."""
    table = preset_table(options.preset, task)
    own_length = TASKS[task].default_max_len if options.preset == "paper" else table["data"].get("max_len")
    length = options.max_len or own_length or TASKS[task].default_max_len
    paper_batch = PAPER_BATCH_SIZES[task] if options.preset == "paper" else table["training"]["batch_size"]
    paper = ModelStep(task, "", paper_batch, length, 0, device, options.preset, options.pooling)
    batch = _choose_batch(options, paper, console)
    steps = {
        name: replace(paper, attention=name, batch_size=batch.size, steps=options.steps) for name in options.attentions
    }
    memory = _rounds([replace(step, steps=0) for step in steps.values()], 1, console)
    timed = [step for step in steps.values() if not isinstance(memory[replace(step, steps=0)], str)]
    seconds = _rounds(timed, options.repeats, console)
    softmax = seconds.get(steps["softmax"], "") if "softmax" in steps else ""
    rows = []
    for step in steps.values():
        taken = memory[replace(step, steps=0)]
        row = _row(step, taken) | {
            "paper_batch_size": paper_batch,
            "batch_note": batch.note,
            "relative": None,
            "relative_processor": None,
            "preset": options.preset,
        }
        rounds = seconds.get(step, taken)
        if isinstance(rounds, str):
            row |= {"not_run": rounds}
        else:
            row |= {
                "seconds": spread([mine.wall for mine in rounds]),
                "processor": spread([mine.processor for mine in rounds]),
                "steps_per_second": spread([1 / mine.wall for mine in rounds]),
            }
            if not isinstance(softmax, str):
                row |= _beside(softmax, rounds)
        rows.append(row)
    return rows


def _beside(softmax: Sequence[Seconds], rounds: Sequence[Seconds]) -> dict[str, Any]:
    """Return how many times as fast as softmax, round by round."""
    pairs = list(zip(softmax, rounds, strict=True))
    return {
        "relative": spread([theirs.wall / mine.wall for theirs, mine in pairs]),
        "relative_processor": spread([theirs.processor / mine.processor for theirs, mine in pairs]),
    }


def _choose_batch(options: ModelBench, paper: ModelStep, console: Console) -> Batch:
    """Return the batch of a task, whose step with the paper's batch is given."""
    if options.batch_size is not None:
        return Batch(paper.batch_size if options.batch_size == "paper" else options.batch_size)

    def probe(attention: str, batch_size: int) -> float:
        step = replace(paper, attention=attention, batch_size=batch_size)
        with console.status(f"does it fit: {step.describe()}"):
            try:
                found = measure_in_own_process(step)
            except RuntimeError:
                return math.inf
            assert not isinstance(found, Seconds), "a step without rounds is one whose memory is taken"
            return found

    most = None
    if options.max_batch_size is not None:
        most = Batch(options.max_batch_size, f"limited to {options.max_batch_size}")
    elif paper.device == "cpu" and paper.preset == "paper":
        most = Batch(CPU_BATCH_SIZES[paper.task], f"limited to {CPU_BATCH_SIZES[paper.task]} on the CPU")
    return choose_batch(probe, options.attentions, paper=paper.batch_size, most=most, memory_limit=options.memory_limit)


def _measure_lengths(options: ModelBench, device: Literal["cpu", "cuda"], console: Console) -> list[dict[str, Any]]:
    """Measure memory by length: a row for each attention and length, with the reason where one was not run."""
    rows: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    for length in sorted(options.lengths):
        steps = {
            name: ModelStep(LENGTH_TASK, name, 1, length, 0, device, options.preset, options.pooling)
            for name in options.length_attentions
        }
        reasons = {name: _reason_to_skip(options, name, length, last.get(name)) for name in steps}
        found = _rounds([steps[name] for name in steps if reasons[name] is None], 1, console)
        for name, step in steps.items():
            row = _row(step, reasons[name] or found[step])
            rows.append(row)
            # What failed or was left out is not tried at a greater length.
            last[name] = row
    return rows


def _reason_to_skip(options: ModelBench, name: str, length: int, last: dict[str, Any] | None) -> str | None:
    quadratic = _is_quadratic(name)
    if quadratic and length > options.quadratic_up_to:
        return f"quadratic, above {options.quadratic_up_to:,} tokens"
    if last is None:
        return None
    if last["not_run"] is not None:
        return str(last["not_run"])
    # Only scores that are written out make memory quadratic; torch's softmax takes quadratic time alone.
    growth = (length / last["length"]) ** (2 if name == MATERIALISED else 1)
    expected = last["memory"] * growth / GIBIBYTE
    if expected > options.memory_limit:
        return f"above the limit of {options.memory_limit:g} GiB from {length:,} tokens on: about {expected:.0f} GiB"
    return None


def _is_quadratic(name: str) -> bool:
    if name == MATERIALISED:
        return True
    config = AttentionSpec.parse(name)
    return "^2" in build_attention(config.name, num_heads=1, head_dim=2, max_len=4).cost


def _row(step: ModelStep, memory: list[Any] | str) -> dict[str, Any]:
    """Return a step and the bytes it takes, or why it was not run."""
    row: dict[str, Any] = asdict(step) | {"seconds": None, "processor": None, "memory": None, "not_run": None}
    return row | ({"not_run": memory} if isinstance(memory, str) else {"memory": memory[0]})


def choose_batch(
    probe: Callable[[str, int], float],
    attentions: Sequence[str],
    *,
    paper: int,
    most: Batch | None,
    memory_limit: float,
) -> Batch:
    """Return the paper's batch, or the most that is allowed, halved until a step fits."""
    start = Batch(paper) if most is None or most.size >= paper else most
    size = largest_that_fits(probe, attentions, start.size, memory_limit * GIBIBYTE)
    if size == start.size:
        return start
    return Batch(size, f"{size} fits {memory_limit:g} GiB") if size else Batch(1, f"1 is above {memory_limit:g} GiB")


def largest_that_fits(
    probe: Callable[[str, int], float], attentions: Sequence[str], start: int, memory_limit: float
) -> int:
    """Return the first of `start`, half of it, and so on, with which a step of the most demanding attention fits; 0 if
    none.

    Memory is linear in the batch: an estimate from 1 and 2 examples rules out what does not fit, and what seems to fit
    is tried. Attentions that fail with 1 example are not counted.
    """
    alone = {name: probe(name, 1) for name in attentions} if start > 1 else {}
    running = [name for name in alone if math.isfinite(alone[name])]
    if not running:
        return start
    name = max(running, key=alone.__getitem__)
    more = probe(name, 2) - alone[name]

    def fits(size: int) -> bool:
        if size == 1:
            return alone[name] <= memory_limit
        return alone[name] + more * (size - 1) <= memory_limit and probe(name, size) <= memory_limit

    size = start
    while size and not fits(size):
        size //= 2
    return size
