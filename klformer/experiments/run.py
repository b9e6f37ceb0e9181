"""One run: a folder with its configuration, its record, its checkpoints and its result.

    runs/<name>/   config.json  metrics.jsonl  tensorboard/  initial.safetensors  checkpoints/  result.json

Everything later (evaluation, comparison, analysis, reports) reads such folders and nothing else.
"""

import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from torch import nn

import klformer
from klformer.experiments.build import build_model
from klformer.experiments.config import AttentionConfig, ExperimentConfig
from klformer.experiments.presets import frequencies
from klformer.tasks import BucketSampler, Examples, Task, build_task, padding_report
from klformer.training.checkpoint import CheckpointStore
from klformer.training.errors import TrainingError
from klformer.training.evaluation import Evaluation, evaluate
from klformer.training.files import write_atomically
from klformer.training.progress import Reporter, SilentReporter
from klformer.training.seeds import derived_seed
from klformer.training.trainer import Trainer

CONFIG, INITIAL, RESULT = "config.json", "initial.safetensors", "result.json"
#: Fields in which a resumed run may differ from what it was started with.
MAY_CHANGE = {"max_steps", "max_epochs", "target_accuracy", "keep_checkpoints", "log_every"}


def attention_label(config: ExperimentConfig) -> str:
    """The attention with the options in which it differs from its preset."""
    usual = frequencies(config.preset, config.task, config.attention.name)
    options = {key: value for key, value in config.attention.options.items() if key not in usual or usual[key] != value}
    return AttentionConfig(name=config.attention.name, options=options).label()


def run_name(config: ExperimentConfig) -> str:
    """The default folder name: task, preset, attention and seed."""
    label = attention_label(config).replace(":", "-").replace(",", "-")
    detail = f"{config.data.sparsity:g}" if config.task == "sparsity" else ""
    return f"{config.task}{detail}-{config.preset}-{label}-seed{config.seed}"


def make_accelerator(config: ExperimentConfig) -> Accelerator:
    """Device, processes and precision: what torchrun says, else one process."""
    return Accelerator(mixed_precision=config.training.mixed_precision, cpu=not torch.cuda.is_available())


def train_run(config: ExperimentConfig, folder: Path, *, resume: bool, reporter: Reporter) -> dict[str, Any]:
    """Train, evaluate and write everything down; returns what is in result.json.

    Args:
        resume: Go on with what is in the folder, if anything is; otherwise the folder must be new.

    Raises:
        TrainingError: the folder holds another run or can't be written, or training can't go on.
        Interrupted: training was asked to stop and has saved its state.
        DataError: something is wrong with the data.
    """
    accelerator = make_accelerator(config)
    if not accelerator.is_main_process:
        reporter = SilentReporter()
    if accelerator.is_main_process:
        _open_folder(config, folder, resume)
    accelerator.wait_for_everyone()
    task = build_task(config.task, config.data, quiet=isinstance(reporter, SilentReporter))
    if accelerator.is_main_process:
        task.prepare()
    accelerator.wait_for_everyone()
    train, validation = task.load("train"), task.load("validation")
    set_seed(derived_seed(config.seed, "weights") % 2**32)
    model = build_model(config, task)
    if accelerator.is_main_process and not (folder / INITIAL).exists():
        write_atomically(folder / INITIAL, lambda path: save_file(_contiguous(model), path))
    trainer = Trainer(
        model,
        train,
        validation,
        num_classes=task.num_classes,
        optimiser=config.optimiser,
        schedule=config.schedule,
        training=config.training,
        folder=folder,
        accelerator=accelerator,
        reporter=reporter,
        seed=config.seed,
    )
    going_on = resume and trainer.resume()
    _introduce(config, task, model, train, trainer, folder, reporter, going_on)
    if trainer.progress.step < trainer.total_steps:
        trainer.run()
    trainer.load_best()
    draws = config.training.evaluation_draws
    result = {
        "validation": trainer.evaluate(validation, draws=draws).as_dict(),
        "test": trainer.evaluate(task.load("test"), draws=draws).as_dict(),
    }
    result = _result(config, task, model, trainer, folder) | result
    if accelerator.is_main_process:
        write_atomically(folder / RESULT, lambda path: path.write_text(json.dumps(result, indent=2) + "\n"))
    reporter.say(f"test accuracy {describe_accuracy(result['test'])} ({task.describe_protocol()})")
    reporter.say(f"results in {folder}")
    return result


def finished_result(config: ExperimentConfig, folder: Path) -> dict[str, Any] | None:
    """What is in the result.json of a run with exactly this configuration; None if it is not done, or another."""
    if not (folder / RESULT).exists() or ExperimentConfig.from_file(folder / CONFIG) != config:
        return None
    result: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return result


def describe_accuracy(result: dict[str, Any]) -> str:
    """Mean, deviation over draws, and vote, in percent."""
    text = f"{100 * result['accuracy']:.2f}%"
    if result["draws"] > 1:
        text += f" +- {100 * result['accuracy_std']:.2f} over {result['draws']} draws"
        text += f", vote {100 * result['voting_accuracy']:.2f}%"
    return text


@dataclass(frozen=True)
class LoadedRun:
    """A run that was read back, with the weights of its best checkpoint."""

    folder: Path
    config: ExperimentConfig
    task: Task
    model: nn.Module
    step: int

    def evaluate(self, split: Any, *, draws: int, accelerator: Accelerator | None = None) -> Evaluation:
        """Accuracy on a split, averaged over draws of the frequencies."""
        return evaluate(
            self.model,
            self.task.load(split),
            accelerator=accelerator or make_accelerator(self.config),
            batch_size=self.config.training.evaluation_batch_size,
            num_classes=self.task.num_classes,
            draws=draws,
            seed=self.config.seed,
        )


def load_run(folder: Path, reporter: Reporter, *, data_root: Path | None = None) -> LoadedRun:
    """Read a run back; nothing is unpickled.

    Raises:
        TrainingError: the folder is not a run's, or has no whole checkpoint.
        ValueError: its configuration is not valid.
    """
    if not (folder / CONFIG).is_file():
        raise TrainingError(f"{folder} is not a run: it has no {CONFIG}")
    config = ExperimentConfig.from_file(folder / CONFIG)
    data = config.data if data_root is None else config.data.model_copy(update={"root": data_root})
    task = build_task(config.task, data)
    model = build_model(config, task)
    store = CheckpointStore(folder / "checkpoints", reporter.say)
    checkpoint = store.newest("best") or store.newest("step")
    if checkpoint is None:
        raise TrainingError(f"{folder} has no whole checkpoint")
    model.load_state_dict(checkpoint.weights())
    return LoadedRun(folder, config, task, model.eval(), checkpoint.step)


def initial_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run started from."""
    return load_file(folder / INITIAL)


def _open_folder(config: ExperimentConfig, folder: Path, resume: bool) -> None:
    """Make the folder and write the configuration, or check that it holds the same run."""
    path = folder / CONFIG
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
        if path.exists():
            if not resume:
                raise TrainingError(f"{folder} holds a run already; --resume goes on with it, --name makes another")
            before = ExperimentConfig.from_file(path)
            _check_same(before, config, folder)
            if before != config:
                # A result of fewer steps is not that of the run that now goes on.
                (folder / RESULT).unlink(missing_ok=True)
        write_atomically(path, lambda target: target.write_text(config.to_json()))
    except OSError as error:
        raise TrainingError(f"can't write to {folder}: {error.strerror or error}") from error


def _check_same(before: ExperimentConfig, now: ExperimentConfig, folder: Path) -> None:
    old, new = flatten(before.model_dump(mode="json")), flatten(now.model_dump(mode="json"))
    changed = [key for key in old | new if old.get(key) != new.get(key) and key.rsplit(".", 1)[-1] not in MAY_CHANGE]
    if changed:
        differences = "; ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in changed)
        raise TrainingError(f"{folder} was started with another configuration: {differences}")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, with dots in the names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _contiguous(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def _introduce(
    config: ExperimentConfig,
    task: Task,
    model: nn.Module,
    train: Examples,
    trainer: Trainer,
    folder: Path,
    reporter: Reporter,
    going_on: bool,
) -> None:
    """Say what is going to happen."""
    parameters = sum(p.numel() for p in model.parameters())
    reporter.say(
        f"{config.task} with {config.attention.label()}, preset {config.preset}, seed {config.seed} -> {folder}"
    )
    reporter.say(f"{len(train):,} training examples from {task.location()}; {parameters:,} parameters")
    for sentence in task.unusual_sizes():
        reporter.say(f"note: {sentence}")
    sampler = BucketSampler(train.lengths, batch_size=config.training.batch_size, seed=config.seed)
    padding = padding_report(train.lengths, sampler.global_batches(0))
    padded, real = padding.padded / len(train), padding.real / len(train)
    reporter.say(
        f"length buckets: {padded:,.0f} tokens an example with padding, {real:,.0f} real ones; "
        f"padding all to the longest would take {padding.longest / padding.padded:.2f}x"
    )
    if going_on:
        reporter.say(f"going on after step {trainer.progress.step}")


def _result(config: ExperimentConfig, task: Task, model: nn.Module, trainer: Trainer, folder: Path) -> dict[str, Any]:
    progress = trainer.progress
    return {
        "name": folder.name,
        "task": config.task,
        "attention": attention_label(config),
        "preset": config.preset,
        "seed": config.seed,
        "protocol": task.describe_protocol(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": progress.step,
        "best_step": progress.best_step,
        "first_reached": progress.first_reached,
        "train_seconds": progress.seconds,
        "train_tokens": progress.tokens,
        "tokens_per_second": progress.tokens / max(progress.seconds, 1e-9),
        "peak_memory_bytes": _peak_memory(),
        "environment": describe_environment(trainer.accelerator),
    }


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Versions and hardware, to be kept with every result."""
    return {
        "klformer": klformer.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
