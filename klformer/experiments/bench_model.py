"""`klformer bench model`: training speed and memory of whole models of the paper, as in its section on efficiency.

Two tables and figures. Speed: training steps per second relative to softmax, and peak memory, for each task of the
paper's tables at its full length. Length: peak memory of the Text model from 1K to 4K tokens, as in the paper, and on
to 64K for the attentions that are linear in the length.

Each measurement is a process of its own: the model and a step on short inputs to warm up, a step whose peak memory is
taken, and steps that are timed. Rounds go over all attentions, so that a slow minute of the machine hits all alike.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from klformer.attention import build_attention
from klformer.bench import measure
from klformer.bench.measure import MEBIBYTE, as_flags, describe_machine, extra_peak_memory, growth, spread
from klformer.checks import check_choice, check_count
from klformer.experiments.build import build_model
from klformer.experiments.config import AttentionConfig, ExperimentConfig
from klformer.experiments.presets import PAPER, preset
from klformer.experiments.profile import random_batch
from klformer.plotting import COLOURS, MARKERS, line_style, save
from klformer.subcommands import Subcommand
from klformer.tasks import TASKS, Batch
from klformer.training.evaluation import class_scores

#: softmax with the scores written out, as it was at the time of the paper; torch's own computes them in pieces.
MATERIALISED = "softmax-materialised"
PAPER_ATTENTIONS = (
    *("softmax", "performer", "linear-elu", "gmm-rks", "fastfood-rks", "generative-rks"),
    *("gmm-prf", "fastfood-prf", "generative-prf"),
)
#: Examples in a step, by task: small enough for 16 GB by estimate, and for steps of seconds on a few cores.
BATCH_SIZES = {"text": 4, "retrieval": 4, "listops": 4, "image": 32}
LENGTH_TASK = "text"
GIBIBYTE = 2**30
SPEED_NOTE = "median (lowest to highest) over processes; MiB: peak above model, optimiser and inputs"
LENGTH_HEADING = f"{LENGTH_TASK} model, one sequence: peak memory of a training step, MiB"
LENGTH_NOTE = "median over processes of the peak above model, optimiser and inputs"
WARM_UP_LENGTH = 16


@dataclass(frozen=True)
class ModelBench:
    """Training steps per second relative to softmax, and peak memory, of the paper's models; memory against length.

    Inputs are random, no data is needed. Examples:

      klformer bench model --out bench
      klformer bench model --tasks text --attentions softmax gmm-rks fastfood-prf --batch-size paper --lengths
      klformer bench model --tasks --lengths 1024 2048 4096 --out bench
    """

    tasks: tuple[str, ...] = tuple(BATCH_SIZES)
    """Tasks of the table of speed; none to leave it out."""
    attentions: tuple[str, ...] = PAPER_ATTENTIONS
    """Attentions, with options after a colon; softmax-materialised is softmax with its scores written out."""
    batch_size: int | Literal["paper"] | None = None
    """Examples in a step; "paper" for the paper's 32 (Image: 256). Default: text, retrieval and listops 4, image 32."""
    max_len: int | None = None
    """Cut all tasks to this length, for a quick look. Default: the tasks' own."""
    lengths: tuple[int, ...] = (1024, 2048, 3072, 4096, 8192, 16384, 32768, 65536)
    """Lengths for the table of memory, of the Text model with one sequence; none to leave it out."""
    length_attentions: tuple[str, ...] = (MATERIALISED, *PAPER_ATTENTIONS)
    """Attentions of that table."""
    quadratic_up_to: int = 4096
    """Longest sequence for attentions that take time quadratic in the length."""
    memory_limit: float = 12.0
    """GiB: a length is left out if going on as from the length before it would take more."""
    steps: int = 3
    """Steps that are timed in a process."""
    repeats: int = 3
    """Rounds, with a process each for every attention."""
    device: Literal["cpu", "cuda"] | None = None
    """Where to compute; the GPU if there is one."""
    out: Path | None = None
    """Folder for model.json, model.svg, model.png, model-length.svg and model-length.png."""


@dataclass(frozen=True)
class ModelStep:
    """Print time and memory of training steps of one model as JSON; `model` calls this in a new process for each."""

    task: str
    """Task of the paper's tables."""
    attention: str
    """Attention, with options after a colon."""
    batch_size: int
    """Examples in a step."""
    length: int
    """Tokens in a sequence."""
    steps: int
    """Steps that are timed."""
    device: Literal["cpu", "cuda"]
    """Where to compute."""

    def describe(self) -> str:
        return f"{self.task}, {self.attention}, {self.batch_size} x {self.length:,} tokens"


def run(options: ModelBench) -> None:
    """Measure, print the tables, and write the figures where they were asked for."""
    _check(options)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(width=max(112, Console().width))
    environment = describe_machine()
    if device == "cuda":
        environment["device"] = torch.cuda.get_device_name()
    console.print(
        f"klformer model benchmark, {environment['date']}, {environment.get('device', environment['machine'])}"
    )
    report: dict[str, Any] = {"environment": environment, "options": _plain(options), "speed": [], "length": []}
    for task in options.tasks:
        rows = _measure_task(options, task, device, console)
        report["speed"] += rows
        _say(console, _speed_heading(task, rows), _speed_table(rows), SPEED_NOTE)
    if options.lengths:
        report["length"] = _measure_lengths(options, device, console)
        reasons = dict.fromkeys(row["not_run"] for row in report["length"] if row["not_run"] is not None)
        notes = [LENGTH_NOTE, *(f"-: {reason}" for reason in reasons)]
        _say(console, LENGTH_HEADING, _length_table(options, report["length"]), "\n".join(notes))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "model.json").write_text(json.dumps(report, indent=2) + "\n")
        if report["speed"]:
            draw_speed(report, options.out / "model.svg", options.out / "model.png")
        if report["length"]:
            draw_length(report, options.out / "model-length.svg", options.out / "model-length.png")
        console.print(f"figures written to {options.out}")


def print_step(options: ModelStep) -> None:
    """Print what `measure_step` finds; meant to be alone in its process."""
    print(json.dumps(measure_step(options)))


def measure_step(options: ModelStep) -> dict[str, float]:
    """Median seconds of a training step, and its peak memory in bytes above model, optimiser and inputs.

    A step is forward, backward and AdamW on random inputs of full length. To be called once in a process.
    """
    config = _configuration(options)
    torch.manual_seed(config.seed)
    task = TASKS[config.task](config.data)
    model = build_model(config, task).to(options.device)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(batch: Batch) -> None:
        with _scores_written_out() if options.attention == MATERIALISED else nullcontext():
            loss = torch.nn.functional.cross_entropy(class_scores(model, batch), batch.labels)
            torch.autograd.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
        if options.device == "cuda":
            torch.cuda.synchronize()

    step(random_batch(task, options.batch_size, length=min(WARM_UP_LENGTH, options.length)).to(options.device))
    batch = random_batch(task, options.batch_size, length=options.length).to(options.device)
    peak = _peak_memory(lambda: step(batch), options.device)
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "memory": peak}


def in_own_process(step: ModelStep) -> dict[str, float]:
    """What `measure_step` finds in a new process.

    Raises:
        RuntimeError: with the end of its error output, if it fails: most often there is not enough memory.
    """
    printed = measure.in_own_process(["bench", "model-step", *as_flags(asdict(step))], module="klformer")
    figures: dict[str, float] = json.loads(printed)
    return figures


def _check(options: ModelBench) -> None:
    for task in options.tasks:
        check_choice("tasks", task, BATCH_SIZES)
    for attention in (*options.attentions, *options.length_attentions):
        AttentionConfig.parse("softmax" if attention == MATERIALISED else attention)
    check_count("repeats", options.repeats)
    check_count("steps", options.steps)


def _configuration(step: ModelStep) -> ExperimentConfig:
    attention = AttentionConfig.parse("softmax" if step.attention == MATERIALISED else step.attention)
    config = preset("paper", step.task, attention)
    return config.model_copy(update={"data": config.data.model_copy(update={"max_len": step.length})})


def _scores_written_out() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH)


def _peak_memory(run_step: Callable[[], None], device: str) -> int:
    if device == "cpu":
        return extra_peak_memory(run_step)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_step()
    return torch.cuda.max_memory_allocated() - before


def _rounds(
    steps: Sequence[ModelStep], repeats: int, console: Console
) -> dict[ModelStep, list[dict[str, float]] | str]:
    """What every round found for each step, or why the first that failed did."""
    found: dict[ModelStep, list[dict[str, float]] | str] = {step: [] for step in steps}
    for index in range(repeats):
        for step in steps:
            before = found[step]
            if isinstance(before, str):
                continue
            with console.status(f"round {index + 1} of {repeats}: {step.describe()}"):
                try:
                    before.append(in_own_process(step))
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
                    found[step] = reason
                    console.print(f"{step.describe()}: {reason}", highlight=False, markup=False)
    return found


def _measure_task(
    options: ModelBench, task: str, device: Literal["cpu", "cuda"], console: Console
) -> list[dict[str, Any]]:
    """A row for each attention on one task."""
    length = TASKS[task].default_max_len if options.max_len is None else options.max_len
    paper_batch = PAPER[task]["training"]["batch_size"]
    batch_size = paper_batch if options.batch_size == "paper" else options.batch_size or BATCH_SIZES[task]
    steps = {name: ModelStep(task, name, batch_size, length, options.steps, device) for name in options.attentions}
    found = _rounds(list(steps.values()), options.repeats, console)
    softmax = found[steps["softmax"]] if "softmax" in steps else ""
    rows = []
    for name, step in steps.items():
        row = _row(step, found[step]) | {"paper_batch_size": paper_batch, "relative": None}
        rounds = found[step]
        if not isinstance(rounds, str):
            row["steps_per_second"] = spread([1 / figures["seconds"] for figures in rounds])
            if not isinstance(softmax, str):
                pairs = zip(softmax, rounds, strict=True)
                row["relative"] = spread([theirs["seconds"] / mine["seconds"] for theirs, mine in pairs])
        rows.append(row | {"attention": name})
    return rows


def _measure_lengths(options: ModelBench, device: Literal["cpu", "cuda"], console: Console) -> list[dict[str, Any]]:
    """A row for each attention and length, with the reason where one was not run."""
    rows: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    for length in sorted(options.lengths):
        steps = {name: ModelStep(LENGTH_TASK, name, 1, length, 1, device) for name in options.length_attentions}
        reasons = {name: _reason_to_skip(options, name, length, last.get(name)) for name in steps}
        found = _rounds([steps[name] for name in steps if reasons[name] is None], options.repeats, console)
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
    expected = last["memory"]["median"] * growth / GIBIBYTE
    if expected > options.memory_limit:
        return f"above the limit of {options.memory_limit:g} GiB from {length:,} tokens on: about {expected:.0f} GiB"
    return None


def _is_quadratic(name: str) -> bool:
    if name == MATERIALISED:
        return True
    config = AttentionConfig.parse(name)
    return "^2" in build_attention(config.name, num_heads=1, head_dim=2, max_len=4).cost


def _row(step: ModelStep, rounds: list[dict[str, float]] | str) -> dict[str, Any]:
    row: dict[str, Any] = asdict(step) | {"seconds": None, "memory": None, "not_run": None}
    if isinstance(rounds, str):
        return row | {"not_run": rounds}
    return row | {key: spread([figures[key] for figures in rounds]) for key in ("seconds", "memory")}


def _say(console: Console, heading: str, table: Table, note: str) -> None:
    """A table between two texts, which a narrow table does not break."""
    console.print(f"\n{heading}", highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(note, highlight=False, markup=False, soft_wrap=True)


def _speed_heading(task: str, rows: Sequence[dict[str, Any]]) -> str:
    batch, paper_batch, length = rows[0]["batch_size"], rows[0]["paper_batch_size"], rows[0]["length"]
    size = "the paper's" if batch == paper_batch else f"the paper has {paper_batch}"
    what = "pairs of sequences" if TASKS[task].is_pair else "sequences"
    return f"{task}: training step of {batch} {what} ({size}) of {length:,} tokens"


def _speed_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("attention")
    for column in ("steps / s", "relative to softmax", "MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        if row["not_run"] is not None:
            table.add_row(row["attention"], "not run", "", "")
            continue
        relative = "" if row["relative"] is None else _with_spread(row["relative"], 1, ".2f")
        speed = _with_spread(row["steps_per_second"], 1, ".3g")
        table.add_row(row["attention"], speed, relative, _with_spread(row["memory"], 1 / MEBIBYTE, ",.0f"))
    return table


def _length_table(options: ModelBench, rows: Sequence[dict[str, Any]]) -> Table:
    lengths = sorted(options.lengths)
    table = Table()
    table.add_column("attention")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    table.add_column("grows as", justify="right")
    for name in options.length_attentions:
        mine = {row["length"]: row["memory"] for row in rows if row["attention"] == name}
        cells = ["-" if mine[length] is None else f"{mine[length]['median'] / MEBIBYTE:,.0f}" for length in lengths]
        measured = [(length, mine[length]["median"]) for length in lengths if mine[length] is not None]
        table.add_row(name, *cells, growth(*zip(*measured, strict=True)) if measured else "")
    return table


def _with_spread(values: dict[str, float], scale: float, form: str) -> str:
    median, low, high = (format(values[key] * scale, form) for key in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def draw_speed(report: dict[str, Any], *targets: Path) -> None:
    """Speed relative to softmax and peak memory, a row for each attention and a colour for each task."""
    rows = [row for row in report["speed"] if row["not_run"] is None]
    tasks = list(dict.fromkeys(row["task"] for row in report["speed"]))
    names = list(dict.fromkeys(row["attention"] for row in report["speed"]))[::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 1.6 + 0.38 * len(names)), sharey=True, layout="constrained")
    for number, task in enumerate(tasks):
        mine = [row for row in rows if row["task"] == task]
        offset = 0.16 * ((len(tasks) - 1) / 2 - number)
        batch = next(row["batch_size"] for row in report["speed"] if row["task"] == task)
        for axes, key, scale in ((left, "relative", 1.0), (right, "memory", 1 / MEBIBYTE)):
            shown = [row for row in mine if row[key] is not None]
            _dots(
                axes, [(names.index(row["attention"]) + offset, row[key]) for row in shown], scale, number, task, batch
            )
    left.axvline(1, color="#888888", linewidth=0.8)
    left.set_xlabel("training steps per second, softmax = 1")
    right.set_xlabel("peak memory of a step, MiB above model, optimiser and inputs")
    left.set_yticks(range(len(names)), names)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside right center", frameon=False)
    where = report["environment"].get("device", report["environment"]["machine"])
    figure.suptitle(f"Training the paper's models: {where}, {report['environment']['date']}", fontsize=10)
    save(figure, *targets)


def _dots(
    axes: Axes, points: Sequence[tuple[float, dict[str, float]]], scale: float, number: int, task: str, batch: int
) -> None:
    """A marker at each median, and a line from the lowest to the highest."""
    if not points:
        return
    medians = [values["median"] * scale for _, values in points]
    below = [(values["median"] - values["low"]) * scale for _, values in points]
    above = [(values["high"] - values["median"]) * scale for _, values in points]
    heights = [height for height, _ in points]
    axes.errorbar(
        medians,
        heights,
        xerr=[below, above],
        fmt=MARKERS[number % len(MARKERS)],
        color=COLOURS[number % len(COLOURS)],
        markersize=4,
        linewidth=1,
        label=f"{task}, batches of {batch}",
    )


def draw_length(report: dict[str, Any], *targets: Path) -> None:
    """Peak memory against the length, both on logarithmic axes."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    rows = [row for row in report["length"] if row["memory"] is not None]
    for number, name in enumerate(dict.fromkeys(row["attention"] for row in rows)):
        points = [(row["length"], row["memory"]["median"] / MEBIBYTE) for row in rows if row["attention"] == name]
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=4, **line_style(number))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["length"] for row in rows}))
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("tokens L")
    axes.set_ylabel("peak memory of a step, MiB above model and optimiser")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside right center", frameon=False)
    date = report["environment"]["date"]
    figure.suptitle(f"Memory against length: the paper's Text model, one sequence, {date}", fontsize=10)
    save(figure, *targets)


def _plain(options: ModelBench) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}


#: For the command group `klformer bench`.
MODEL_BENCHMARKS: dict[str, Subcommand] = {"model": (ModelBench, run), "model-step": (ModelStep, print_step)}
