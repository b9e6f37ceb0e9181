"""The command `klformer`: train, compare, eval, curves, profile, report, analyze, bench, data, list.

The defaults of `train` and `compare` are those of the chosen preset, so that task, attention and preset are looked for
in the arguments first, and tyro then reads all of them with these defaults.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from pydantic import ValidationError
from rich.console import Console

import klformer
from klformer.bench.profile import profile_padding, profile_step
from klformer.checks import suggestion
from klformer.cli.analyze import main as analyze
from klformer.cli.bench import main as bench
from klformer.cli.data import Data
from klformer.cli.data import parse as parse_data
from klformer.cli.data import run as run_data
from klformer.cli.listing import print_list
from klformer.cli.report import Report
from klformer.cli.report import run as write_report
from klformer.cli.subcommands import peek
from klformer.config import describe_problems
from klformer.errors import ArgumentError, ArgumentTypeError, Interrupted, OtherProcessFailedError, UserError
from klformer.report.curves import draw_curves
from klformer.runs.compare import compare, comparison_name, comparison_table
from klformer.runs.config import AttentionConfig, ExperimentConfig, ModelConfig
from klformer.runs.load import load_run
from klformer.runs.naming import attention_label, describe_score, run_name
from klformer.runs.presets import DEFAULT_ATTENTION, DEFAULT_PRESET, DEFAULT_TASK, preset
from klformer.runs.train import train_run
from klformer.tasks import DataConfig
from klformer.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig
from klformer.training.processes import is_main_process, leave_processes
from klformer.training.progress import make_reporter


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a preset sets and any flag can replace."""

    data: DataConfig
    model: ModelConfig
    optimiser: OptimiserConfig
    schedule: ScheduleConfig
    training: TrainingConfig

    def experiment(self, task: str, preset_name: str, attention: AttentionConfig, seed: int) -> ExperimentConfig:
        """The full configuration; options of the attention that were not given are the preset's."""
        chosen = {name: getattr(self, name) for name in SETTINGS}
        if self.data.root is not None:
            # The run is to find its data from any other folder.
            chosen["data"] = self.data.model_copy(update={"root": self.data.root.expanduser().absolute()})
        usual = preset(preset_name, task, attention).model_dump()
        return ExperimentConfig.model_validate({**usual, **chosen, "seed": seed})


SETTINGS = tuple(setting.name for setting in fields(Settings))


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

    task: str = DEFAULT_TASK
    """Task; `klformer list` names them."""
    attention: str = DEFAULT_ATTENTION
    """Attention, with options after a colon: gmm-rks:num_frequencies=128,init=identity."""
    preset: Literal["paper", "laptop"] = "laptop"
    """paper: the paper's tables. laptop: the same tasks for two cores and some minutes."""
    seed: int = 0
    """Seed of weights, order of the data, dropout and frequencies."""
    out: Path = Path("runs")
    """Folder for runs."""
    name: str | None = None
    """Name of the run's folder; made of task, preset, attention and seed if not given."""
    resume: bool = False
    """Go on with the run in that folder, if there is one."""
    quiet: bool = False
    """Say nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class Compare(Settings):
    """Train several attentions over several seeds on one task, and print one table.

    Runs that are done are not done again, and interrupted ones go on. Examples:

      klformer compare --task sparsity --attentions gmm-rks gmm-rks:frozen=true performer softmax
      klformer compare --task text --attentions gmm-prf softmax --seeds 0 1 2 --training.max-steps 500
    """

    task: str = DEFAULT_TASK
    """Task; `klformer list` names them."""
    attentions: tuple[str, ...] = ("gmm-rks", "gmm-rks:frozen=true", "performer", "softmax")
    """Attentions, each with options after a colon."""
    seeds: tuple[int, ...] = (0,)
    """One run of every attention for each."""
    preset: Literal["paper", "laptop"] = "laptop"
    """paper: the paper's tables. laptop: the same tasks for two cores and some minutes."""
    out: Path = Path("runs")
    """Folder for runs."""
    quiet: bool = False
    """Print the table only."""


@dataclass(frozen=True)
class Eval:
    """Evaluate the best checkpoint of a run, averaged over draws of its frequencies.

    Example: klformer eval runs/sparsity0.5-laptop-gmm-rks-seed0 --draws 100
    """

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    split: Literal["train", "validation", "test"] = "test"
    """What to evaluate on."""
    draws: int = 10
    """Draws of the frequencies: mean, deviation and majority vote."""
    data_root: Path | None = None
    """Where the data is, if not where the run had it."""


@dataclass(frozen=True)
class List:
    """List attentions with their options, tasks and presets."""


@dataclass(frozen=True)
class Curves:
    """Draw the validation accuracy of runs against steps.

    Example: klformer curves runs/sparsity0.5-* --out curves.svg
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    out: Path = Path("curves.svg")
    """File to write: svg, png or pdf."""
    title: str | None = None
    """Title of the figure."""


@dataclass(frozen=True)
class Profile:
    """Memory of one training step of a preset's model at full length, and the share of attention in its time.

    Example: klformer profile --task text --attention gmm-rks --batch-size 4
    """

    task: str = "text"
    """Task; the inputs are random, no data is needed."""
    attention: str = DEFAULT_ATTENTION
    """Attention, with options after a colon."""
    preset: Literal["paper", "laptop"] = "paper"
    """Preset of the model."""
    batch_size: int = 4
    """Examples in the step."""
    padding: int | None = None
    """Compare instead so many batches of the training data, padded to their own longest sequence and to that of all."""
    data_root: Path | None = None
    """Folder of the data, for --padding."""


COMMANDS: dict[str, type] = {
    "train": Train,
    "compare": Compare,
    "eval": Eval,
    "curves": Curves,
    "profile": Profile,
    "report": Report,
    "data": Data,
    "list": List,
}

#: Commands with commands of their own.
GROUPS: dict[str, Callable[[Sequence[str]], None]] = {
    "analyze": analyze,
    "bench": bench,
}

USAGE = """\
klformer: Transformers whose attention kernel is learned from data, linear in the sequence length.

usage: klformer COMMAND [OPTIONS]        klformer COMMAND --help says more

  train      train a Transformer with one attention on one task
  compare    train several attentions over several seeds, and print one table
  eval       evaluate a run, averaged over draws of its frequencies
  curves     draw the validation accuracy of runs against steps
  profile    memory and time of one training step of a preset's model
  report     write runs as one page for a browser, beside the paper's figures
  analyze    check the paper's claims on runs: `klformer analyze --help` names the analyses
  bench      measure attentions and operators: `klformer bench --help` names the benchmarks
  data       generate data, check it, or say where it is
  list       attentions with their options, tasks and presets

A first try:  klformer train --task sparsity --attention gmm-rks --training.max-steps 300
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; errors that are the user's to act on are one line and exit code 1 or 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"klformer {klformer.__version__}")
        return
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        raise SystemExit(0 if arguments else 2)
    try:
        if arguments[0] in GROUPS:
            GROUPS[arguments[0]](arguments[1:])
        else:
            _run(_parse(arguments))
        leave_processes()
    except Interrupted as stop:
        leave_processes()
        _fail(f"{stop}\nGo on with the same command and --resume (compare goes on by itself).", 130)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except ValidationError as error:
        _fail(describe_problems(error), 2)
    except (ArgumentError, ArgumentTypeError) as error:
        _fail(str(error), 2)
    except UserError as error:
        _fail(str(error), 1)
    except OtherProcessFailedError:
        raise SystemExit(1) from None
    except BrokenPipeError:
        # Whoever read the output has left; nothing more can be said, not even by the interpreter at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)


def _fail(message: str, code: int) -> None:
    print(f"klformer: {message}", file=sys.stderr)
    raise SystemExit(code)


def _parse(arguments: list[str]) -> Any:
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        known = [*COMMANDS, *GROUPS]
        raise ArgumentError(f"unknown command {name!r}{suggestion(name, known)} Commands: {', '.join(known)}")
    if name == "data":
        return parse_data(rest)
    default: Any = tyro.MISSING_NONPROP
    command = COMMANDS[name]
    if name in ("train", "compare"):
        peeked = peek(rest, task=DEFAULT_TASK, attention=DEFAULT_ATTENTION, preset=DEFAULT_PRESET)
        chosen = preset(peeked.preset, peeked.task, AttentionConfig.parse(peeked.attention))
        settings = {setting: getattr(chosen, setting) for setting in SETTINGS}
        command = _with_data_of(COMMANDS[name], type(chosen.data))
        default = command(**settings, task=peeked.task, preset=peeked.preset)
    return tyro.cli(command, args=rest, default=default, prog=f"klformer {name}")


def _with_data_of(command: type, data: type[DataConfig]) -> type:
    """The command with the options that the data of a task has."""
    own, documented = [("data", data)], {"__doc__": command.__doc__}
    return make_dataclass(command.__name__, own, bases=(command,), frozen=True, kw_only=True, namespace=documented)


def _run(command: Any) -> None:
    match command:
        case Train():
            _train(command)
        case Compare():
            _compare(command)
        case Eval():
            _evaluate(command)
        case Curves():
            draw_curves(command.runs, command.out, title=command.title)
            print(f"written to {command.out}")
        case Profile():
            _profile(command)
        case Report():
            write_report(command)
        case [Data(), *_]:
            run_data(command)
        case List():
            print_list()


def _train(command: Train) -> None:
    attention = AttentionConfig.parse(command.attention)
    config = command.experiment(command.task, command.preset, attention, command.seed)
    folder = command.out.expanduser() / (command.name or run_name(config))
    train_run(config, folder, resume=command.resume, reporter=make_reporter(quiet=command.quiet))


def _compare(command: Compare) -> None:
    if not command.attentions or not command.seeds:
        raise ArgumentError("give at least one attention and one seed")
    attentions = [AttentionConfig.parse(text) for text in command.attentions]
    configs = [
        command.experiment(command.task, command.preset, attention, seed)
        for seed in command.seeds
        for attention in attentions
    ]
    out = command.out.expanduser()
    results = compare(configs, out, reporter=make_reporter(quiet=command.quiet))
    if not is_main_process():
        return
    console = Console(width=max(120, Console().width))
    console.print(comparison_table(results))
    console.print(f"runs and {comparison_name(configs[0])} are in {out}", highlight=False)


def _evaluate(command: Eval) -> None:
    if command.draws < 1:
        raise ArgumentError(f"draws must be at least 1, got {command.draws}")
    reporter = make_reporter(quiet=not is_main_process())
    run = load_run(command.run, reporter, data_root=command.data_root)
    reporter.say(f"{run.config.task} with {attention_label(run.config)}, best checkpoint, step {run.step}")
    result = run.evaluate(command.split, draws=command.draws)
    reporter.say(f"{command.split}: {result.num_examples:,} examples, {describe_score(run.metric, result.as_dict())}")


def _profile(command: Profile) -> None:
    config = preset(command.preset, command.task, AttentionConfig.parse(command.attention))
    print(f"{config.task} with {attention_label(config)}, preset {config.preset}")
    if command.padding is None:
        print(profile_step(config, batch_size=command.batch_size).describe())
        return
    if command.padding < 1:
        raise ArgumentError(f"padding must be at least 1 batch, got {command.padding}")
    if command.data_root is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"root": command.data_root})})
    print(profile_padding(config, num_batches=command.padding).describe())
