"""`klformer demo`: the main job in a minute, which is what `make run` runs."""

from dataclasses import asdict, dataclass
from pathlib import Path

from klformer.conversion.threads import threads
from klformer.lab.cli.command import plain_command
from klformer.lab.runs.demo import FIGURE, SUMMARY, demo_table, demonstrate, what_was_seen
from klformer.lab.terminal import make_console
from klformer.lab.training.progress import make_reporter


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


def run(options: Demo) -> None:
    """Train, convert, print a table and two sentences."""
    with threads(1):  # its products are small
        rows = demonstrate(
            options.out, make_reporter(quiet=False), train_steps=options.train_steps, fit_steps=options.fit_steps
        )
    demo_table([asdict(row) for row in rows]).print(make_console(100))
    print(what_was_seen(rows))
    print(f"{SUMMARY} and {FIGURE} (one head's weights before and after) are in {options.out}")


COMMAND = plain_command(Demo, run)
