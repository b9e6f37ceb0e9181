"""`klformer demo`, which is what `make run` runs: the main job in a minute.

A small softmax model learns associative recall (`tasks/recall.py`), which nothing but sharp attention solves. Then its
softmax gives way to Performer's fixed kernel and to kernels that are learned from its queries and keys, nothing else
changed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from klformer.attention import AttentionMechanism, AttentionSpec, MultiheadAttention
from klformer.conversion import Conversion, convert
from klformer.conversion.hosts import Batch as Inputs
from klformer.conversion.threads import threads
from klformer.files import write_json
from klformer.lab.cli.command import plain_command
from klformer.lab.data import Examples
from klformer.lab.data.batching import collate
from klformer.lab.data.sequences import IGNORED
from klformer.lab.environment import describe_environment, typed_command
from klformer.lab.plotting import save
from klformer.lab.runs.compare import compare
from klformer.lab.runs.config import preset
from klformer.lab.runs.load import load_run
from klformer.lab.runs.naming import run_name
from klformer.lab.runs.sweep import Variant
from klformer.lab.tables import Table, number, percent, words
from klformer.lab.tasks import Split
from klformer.lab.terminal import make_console
from klformer.lab.training.progress import Reporter, make_reporter

#: What takes the place of softmax, and whether its kernel is learned.
CONTENDERS = (
    ("performer:num_frequencies=256", False),
    ("generative-prf:num_frequencies=128,redraw=false,window=0", True),
    ("atoms-prf:num_frequencies=64,window=0", True),
    ("atoms-prf:num_frequencies=128,window=0", True),
)
SUMMARY, FIGURE = "summary.json", "kernel.png"
BATCH_SIZE, HELD_OUT, LONG, REPEATS = 64, 4, 16_384, 3


@dataclass(frozen=True)
class Row:
    """What became of the model with one attention."""

    attention: str
    learned: bool
    num_frequencies: int | None
    accuracy: float
    seconds: float
    """Of training for softmax, of conversion for the others."""
    long_seconds: float
    """Of the attention alone, forward, at LONG tokens."""


def demonstrate(
    folder: Path,
    reporter: Reporter,
    *,
    train_steps: int = 400,
    fit_steps: int = 300,
    num_examples: int = 20_000,
    long: int = LONG,
) -> list[Row]:
    """Train, convert, and write the rows and a figure to the folder."""
    training = {"max_steps": train_steps, "evaluate_every": train_steps // 2, "checkpoint_every": train_steps}
    changes = {"data": {"num_examples": num_examples}, "training": training}
    config = preset("laptop", "recall", AttentionSpec(name="softmax"), changes)
    (result,) = compare([Variant(config)], folder, reporter=reporter)
    loaded = load_run(folder / run_name(config), reporter)
    data = {split: _batches(loaded.examples(split)) for split in get_args(Split)}
    teacher = loaded.model
    rows = [
        Row(
            "softmax",
            learned=False,
            num_frequencies=None,
            accuracy=_accuracy(teacher, data["test"]),
            seconds=result["train_seconds"],
            long_seconds=_long_seconds(_attention(teacher), long),
        )
    ]
    held_out = data["validation"][:HELD_OUT]
    learned: list[tuple[Conversion, Conversion]] = []
    for label, is_learned in CONTENDERS:
        spec = AttentionSpec.parse(label)
        begin = time.perf_counter()
        before = convert(teacher, data["train"], attention=spec, steps=0, evaluation=held_out)
        after = before
        if is_learned:
            begin = time.perf_counter()
            after = convert(teacher, data["train"], attention=spec, steps=fit_steps, evaluation=held_out)
            learned.append((before, after))
        seconds = time.perf_counter() - begin
        frequencies = spec.complete().options["num_frequencies"]
        assert isinstance(frequencies, int)
        row = Row(
            spec.name,
            is_learned,
            frequencies,
            _accuracy(after.model, data["test"]),
            seconds,
            _long_seconds(_attention(after.model), long),
        )
        reporter.say(f"{label}: {row.accuracy:.1%} after {seconds:.0f} s")
        rows.append(row)
    report = {"environment": describe_environment(), "command": typed_command(), "rows": [asdict(row) for row in rows]}
    write_json(folder / SUMMARY, report)
    _draw(folder / FIGURE, teacher, *learned[-1], data["test"][0])
    return rows


def demo_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the summary as the terminal and the docs show it."""
    lines = [
        {
            "attention": words(row["attention"], code=True),
            "kernel": "learned" if row["learned"] else "none" if row["num_frequencies"] is None else "fixed",
            "features R": row["num_frequencies"],
            "accuracy": percent(row["accuracy"], "{:.1f}%"),
            "seconds": number(row["seconds"], "{:.0f}"),
            f"s at {LONG:,} tokens": number(row["long_seconds"], "{:.3f}"),
        }
        for row in rows
    ]
    return Table.of(lines, "associative recall: a trained softmax model with its attention replaced")


def what_was_seen(rows: list[Row]) -> str:
    """Describe the rows in two sentences."""
    softmax = rows[0]
    fixed = next(row for row in rows[1:] if not row.learned)
    best = max((row for row in rows if row.learned), key=lambda row: row.accuracy)
    return (
        f"With Performer's fixed kernel of {fixed.num_frequencies} features in the place of softmax, the accuracy of "
        f"the same model goes from {softmax.accuracy:.1%} to {fixed.accuracy:.1%}; with {best.attention}, whose "
        f"{best.num_frequencies} features are learned from the model's own queries and keys in {best.seconds:.0f} s, "
        f"it is {best.accuracy:.1%}.\n"
        f"At {LONG:,} tokens this attention takes {best.long_seconds:.2f} s, where softmax takes "
        f"{softmax.long_seconds:.2f} s."
    )


def _batches(examples: Examples) -> list[Inputs]:
    """Return batches with the keywords of the model's `forward`, and labels."""
    starts = range(0, len(examples), BATCH_SIZE)
    made = (collate(examples, np.arange(i, min(i + BATCH_SIZE, len(examples)))) for i in starts)
    return [{"inputs": each.inputs, "key_mask": each.key_mask, "labels": each.targets} for each in made]


@torch.no_grad()
def _accuracy(model: nn.Module, batches: list[Inputs]) -> float:
    right = asked = 0
    for batch in batches:
        wanted = batch["labels"] != IGNORED
        answers = model(batch["inputs"], batch["key_mask"]).argmax(-1)
        right += int((answers == batch["labels"])[wanted].sum())
        asked += int(wanted.sum())
    return right / asked


def _attention(model: nn.Module) -> AttentionMechanism:
    """Return the attention of the only layer."""
    return next(layer.mechanism for layer in model.modules() if isinstance(layer, MultiheadAttention))


@torch.no_grad()
def _long_seconds(mechanism: AttentionMechanism, tokens: int) -> float:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, mechanism.num_heads, tokens, mechanism.head_dim)
    q, k, v = (torch.randn(sizes, generator=generator) for _ in range(3))
    # Not through `forward`, which knows how long the sequences of the task are.
    return _median_seconds(lambda: mechanism.attend(q, k, v, key_mask=None, causal=False))


def _median_seconds(run: Callable[[], Tensor]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return median(times)


@torch.no_grad()
def _draw(target: Path, teacher: nn.Module, before: Conversion, after: Conversion, batch: Inputs) -> None:
    """Draw what one head weighs the keys of one sequence with: softmax, the kernel before it is fitted, and after."""
    panels = {"softmax": teacher, "kernel, before fitting": before.model, "kernel, fitted": after.model}
    weights = {name: _weights(model, batch) for name, model in panels.items()}
    asked = batch["labels"][0] != IGNORED
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 2.6), sharey=True, layout="constrained")
    for panel, (name, each) in zip(axes, weights.items(), strict=True):
        image = panel.imshow(each[asked].numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        panel.set_title(name)
        panel.set_xlabel("key")
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes, label="weight")
    save(figure, target)


def _weights(model: nn.Module, batch: Inputs) -> Tensor:
    """Return weights (L, S) of the first head, for the first sequence: attention to the identity."""
    layer = next(layer for layer in model.modules() if isinstance(layer, MultiheadAttention))
    found: list[Tensor] = []

    def look(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        q, k, _v = args
        identity = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
        found.append(layer.mechanism.attend(q, k, identity, key_mask=kwargs["key_mask"], causal=False)[0])

    handle = layer.mechanism.register_forward_pre_hook(look, with_kwargs=True)
    try:
        model(batch["inputs"], batch["key_mask"])
    finally:
        handle.remove()
    return found[0][0]


@dataclass(frozen=True)
class Demo:
    """Train a small softmax model, replace its attention by fixed and by learned kernels, and print what was kept.

    Example: klformer demo --out runs/demo
    """

    out: Path = Path("runs/demo")
    """Folder for the run of the softmax model, summary.json and kernel.png."""
    train_steps: int = 400
    """Steps that the softmax model is trained for."""
    fit_steps: int = 300
    """Steps that each kernel is fitted for."""


def show_demo(options: Demo) -> None:
    """Train, convert, print a table and two sentences."""
    with threads(1):  # its products are small
        rows = demonstrate(
            options.out, make_reporter(quiet=False), train_steps=options.train_steps, fit_steps=options.fit_steps
        )
    demo_table([asdict(row) for row in rows]).print(make_console(100))
    print(what_was_seen(rows))
    print(f"{SUMMARY} and {FIGURE} (one head's weights before and after) are in {options.out}")


COMMAND = plain_command(Demo, show_demo)
