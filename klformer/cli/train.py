"""`klformer train`: one run."""

from dataclasses import dataclass
from functools import partial

from klformer.cli.command import Command
from klformer.cli.settings import Settings, parse_settings
from klformer.models import AttentionSpec
from klformer.runs.naming import run_name
from klformer.runs.presets import DEFAULT_ATTENTION
from klformer.runs.train import train_run
from klformer.training.progress import make_reporter


@dataclass(frozen=True, kw_only=True)
class Train(Settings):
    """Train a Transformer with one attention on one task.

    The defaults shown are those of the chosen task and preset. Examples:

      klformer train --task sparsity --attention gmm-prf
      klformer train --task text --attention gmm-rks:num_frequencies=128 --data.root ~/data --training.max-steps 2000
      klformer train --task listops --attention performer --preset paper
      klformer train --task text --attention gmm-prf:frozen=true --resume
      torchrun --nproc-per-node 2 -m klformer train --task listops --attention fastfood-prf
    """

    attention: str = DEFAULT_ATTENTION
    """Attention, with options after a colon: gmm-rks:num_frequencies=128,init=identity."""
    seed: int = 0
    """Seed of weights, order of the data, dropout and frequencies."""
    name: str | None = None
    """Name of the run's folder; made of task, preset, attention and seed if not given."""
    resume: bool = False
    """Go on with the run in that folder, if there is one."""


def run(options: Train) -> None:
    """Train, and say where the results are."""
    config = options.experiment(AttentionSpec.parse(options.attention), options.seed)
    folder = options.out.expanduser() / (options.name or run_name(config))
    train_run(config, folder, resume=options.resume, reporter=make_reporter(quiet=options.quiet))


COMMAND = Command(partial(parse_settings, Train), run)
