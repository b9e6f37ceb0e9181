"""`klformer profile`: what a training step takes."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from klformer.errors import ArgumentError
from klformer.lab.bench.measure import write_report
from klformer.lab.bench.profile import profile_padding, profile_step
from klformer.lab.cli.command import plain_command
from klformer.lab.environment import describe_machine
from klformer.lab.runs.config import DEFAULT_ATTENTION, preset
from klformer.lab.runs.naming import attention_label
from klformer.models import AttentionSpec


@dataclass(frozen=True)
class Profile:
    """Memory of one training step of a preset's model at full length, and the share of attention in its time.

    Example: klformer profile --task text --attention gmm-rks --batch-size 4
    """

    task: str = "text"
    """Task; the inputs are random, no data is needed."""
    attention: str = DEFAULT_ATTENTION
    """Attention, with options after a colon."""
    preset: str = "paper"
    """Preset of the model."""
    batch_size: int = 4
    """Examples in the step."""
    padding: int | None = None
    """Compare instead so many batches of the training data, padded to their own longest sequence and to that of all."""
    data_root: Path | None = None
    """Folder of the data, for --padding."""
    json: Path | None = None
    """Write all figures to this file."""


def profile_model(options: Profile) -> None:
    """Measure and print, and write the figures where they were asked for."""
    if options.padding is not None and options.padding < 1:
        raise ArgumentError(f"padding must be at least 1 batch, got {options.padding}")
    data = {} if options.data_root is None else {"root": options.data_root}
    config = preset(options.preset, options.task, AttentionSpec.parse(options.attention), {"data": data})
    print(f"{config.task} with {attention_label(config)}, preset {config.preset}")
    found = (
        profile_step(config, batch_size=options.batch_size)
        if options.padding is None
        else profile_padding(config, num_batches=options.padding)
    )
    print(found.describe())
    row = {"task": config.task, "attention": attention_label(config), "preset": config.preset, **asdict(found)}
    write_report(options.json, describe_machine(), {"results": [row]}, Console())


COMMAND = plain_command(Profile, profile_model)
