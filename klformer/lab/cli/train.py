"""`klformer train`: one run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from klformer.errors import RunError
from klformer.lab.cli.command import Command, is_given, peek
from klformer.lab.cli.settings import DEFAULT_OUT, Settings, read_settings
from klformer.lab.runs.config import DEFAULT_ATTENTION, ExperimentConfig
from klformer.lab.runs.encoder import PretrainedEncoder, read_encoder
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.naming import check_name, run_name
from klformer.lab.runs.train import train_run
from klformer.lab.tasks import TASKS
from klformer.lab.training.progress import make_reporter
from klformer.models import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Train(Settings):
    """Train a Transformer with one attention on one task.

    The defaults shown are those of the chosen task and preset. Examples:

      klformer train --task sparsity --attention gmm-prf
      klformer train --task text --attention gmm-rks:num_frequencies=128 --data.root ~/data --training.max-steps 2000
      klformer train --task csv --data.train reviews.csv --encoder bert-linear
      klformer train --name text-laptop-gmm-prf-seed0 --resume
      klformer train --task sst2 --data.root glue_data --init-from runs/corpus-wikitext-2-masked-laptop-softmax-seed0
      torchrun --nproc-per-node 2 -m klformer train --task listops --attention fastfood-prf
      torchrun --nproc-per-node 4 -m klformer train --task text --attention gmm-rks --parallel.sequence 4
    """

    #: What is learned.
    objective: ClassVar[Literal["task", "masked"]] = "task"

    attention: str = DEFAULT_ATTENTION
    """Attention, with options after a colon: gmm-rks:num_frequencies=128,init=identity."""
    seed: int = 0
    """Seed of weights, order of the data, dropout and frequencies."""
    init_from: Path | None = None
    """A run to take embedding and encoder from (`klformer pretrain`); its model, attention and tokens are defaults."""
    encoder: Path | None = None
    """Folder of a pretrained encoder to build on, softmax or converted."""
    name: str | None = None
    """Name of the run's folder; made of task, preset, attention and seed if not given."""
    resume: bool = False
    """Go on with the run of that name, which says itself what it is: flags are needed for what is to change. Without a
    name: go on with the run that the other flags name, if there is one."""


def parse(arguments: Sequence[str], prog: str) -> Train:
    """Read the arguments; what a run that goes on was started with takes the place of the preset."""
    return read_settings(Train, arguments, prog, resumed=resumed(arguments))


def resumed(arguments: Sequence[str]) -> ExperimentConfig | None:
    """Return the configuration of the run that is named and to go on, if one is."""
    peeked = peek(arguments, name=None, out=str(DEFAULT_OUT))
    if peeked.name is None or not is_given(arguments, "resume"):
        return None
    run = RunFolder(Path(peeked.out).expanduser() / check_name(peeked.name))
    if not run.is_run():
        raise RunError(f"there is no run {run} to go on with; without --resume it is started{_others(run.path.parent)}")
    return run.config()


def _others(folder: Path) -> str:
    """Return the runs that there are, for an error."""
    names = sorted(path.name for path in folder.glob("*") if RunFolder(path).is_run())
    return f". Runs in {folder}: {', '.join(names)}" if names else ""


def train(options: Train) -> None:
    """Train, and say where the results are."""
    config = options.resolve(
        AttentionSpec.parse(options.attention),
        options.seed,
        objective=options.objective,
        encoder=_encoder(options),
        init_from=None if options.init_from is None else options.init_from.expanduser().absolute(),
    )
    folder = options.out.expanduser() / (run_name(config) if options.name is None else check_name(options.name))
    train_run(config, folder, resume=options.resume, reporter=make_reporter(quiet=options.quiet))


def _encoder(options: Train) -> PretrainedEncoder | None:
    """Return the encoder to build on; of a run that goes on the one that it has."""
    if options.encoder is None:
        return None
    if options.resume and options.name is not None:
        return RunFolder(options.out.expanduser() / check_name(options.name)).config().encoder
    return read_encoder(options.encoder, options.data.max_len or TASKS[options.task].default_max_len)


COMMAND = Command(parse, train)
