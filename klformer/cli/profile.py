"""`klformer profile`: what a training step takes."""

from dataclasses import dataclass
from pathlib import Path

from klformer.bench.profile import profile_padding, profile_step
from klformer.cli.command import plain_command
from klformer.errors import ArgumentError
from klformer.models import AttentionSpec
from klformer.runs.naming import attention_label
from klformer.runs.presets import DEFAULT_ATTENTION, preset


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


def run(options: Profile) -> None:
    """Measure and print.

    Raises:
        ArgumentError: there is no such task or attention, or nothing to measure.
    """
    config = preset(options.preset, options.task, AttentionSpec.parse(options.attention))
    print(f"{config.task} with {attention_label(config)}, preset {config.preset}")
    if options.padding is None:
        print(profile_step(config, batch_size=options.batch_size).describe())
        return
    if options.padding < 1:
        raise ArgumentError(f"padding must be at least 1 batch, got {options.padding}")
    if options.data_root is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"root": options.data_root})})
    print(profile_padding(config, num_batches=options.padding).describe())


COMMAND = plain_command(Profile, run)
