"""One run: a folder with its configuration, its record, its checkpoints and its result.

    runs/<name>/   config.json  data.json  metrics.jsonl  tensorboard/  initial.safetensors  checkpoints/  result.json

config.json is written when data and model are there, just before the first step: what fails earlier leaves no run.

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
from typing import Any, get_args

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from torch import nn

import klformer
from klformer.experiments.build import build_model
from klformer.experiments.config import AttentionConfig, ExperimentConfig
from klformer.experiments.presets import usual_options
from klformer.tasks import BucketSampler, Examples, Split, Task, build_task, padding_report
from klformer.training.checkpoint import CheckpointStore
from klformer.training.errors import TrainingError
from klformer.training.evaluation import Evaluation, evaluate
from klformer.training.files import write_atomically
from klformer.training.progress import Reporter, SilentReporter
from klformer.training.seeds import derived_seed
from klformer.training.trainer import Trainer

CONFIG, DATA, INITIAL, RESULT = "config.json", "data.json", "initial.safetensors", "result.json"
#: Fields that say how long a run is.
LENGTH = {"training.max_steps", "training.max_epochs"}
#: Fields in which a resumed run may differ from what it was started with. The data may be in another place, but not
#: other data: that is told by its fingerprint.
MAY_CHANGE = LENGTH | {"training.target_accuracy", "training.keep_checkpoints", "training.log_every", "data.root"}


def attention_label(config: ExperimentConfig) -> str:
    """The attention with the options in which it differs from its preset."""
    usual = usual_options(config.preset, config.task, config.attention.name)
    options = {key: value for key, value in config.attention.options.items() if key not in usual or usual[key] != value}
    return AttentionConfig(name=config.attention.name, options=options).label()


def task_label(task: str, sparsity: float | None) -> str:
    """The task as tables name it: that of sparsity with its p, if it is known, because each p is a task of its own."""
    return f"{task} {sparsity:g}" if task == "sparsity" and sparsity is not None else task


def run_name(config: ExperimentConfig) -> str:
    """The default folder name: task, preset, attention and seed."""
    label = attention_label(config).replace(":", "-").replace(",", "-")
    return f"{setting_name(config)}-{label}-seed{config.seed}"


def setting_name(config: ExperimentConfig) -> str:
    """What the runs of a comparison have in common: task and preset."""
    task = task_label(config.task, config.data.sparsity).replace(" ", "")
    return f"{task}-{config.preset}"


def make_accelerator(config: ExperimentConfig) -> Accelerator:
    """Device, processes and precision: what torchrun says, else one process."""
    return Accelerator(mixed_precision=config.training.mixed_precision, cpu=not torch.cuda.is_available())


def leave_processes() -> None:
    """End what the processes of torchrun talk through: left to the interpreter's end, its threads can abort one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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
    before = _open_folder(config, folder, resume) if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    task = build_task(config.task, config.data, quiet=isinstance(reporter, SilentReporter))
    if accelerator.is_main_process:
        task.prepare()
    accelerator.wait_for_everyone()
    # Test as well: what is wrong with it is to be seen before training, not after.
    splits: dict[Split, Examples] = {split: task.load(split) for split in get_args(Split)}
    set_seed(derived_seed(config.seed, "weights") % 2**32)
    model = build_model(config, task)
    if accelerator.is_main_process and not (before and (folder / INITIAL).exists()):
        write_atomically(folder / INITIAL, lambda path: save_file(_contiguous(model), path))
    trainer = Trainer(
        model,
        splits["train"],
        splits["validation"],
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
    if trainer.total_steps < trainer.progress.step:
        raise TrainingError(
            f"{folder} has done {trainer.progress.step} steps, which can't become {trainer.total_steps}; "
            "ask for as many or more, or make another run"
        )
    if accelerator.is_main_process:
        _write_beginning(config, before, splits, folder)
    _introduce(config, task, model, splits["train"], folder, reporter)
    if going_on:
        reporter.say(f"going on after step {trainer.progress.step}")
        _note_other_schedule(config, before, reporter)
    trainer.run()
    with trainer.final_evaluation():
        trainer.load_best()
        draws = config.training.evaluation_draws
        result = {
            "validation": trainer.evaluate(splits["validation"], draws=draws).as_dict(),
            "test": trainer.evaluate(splits["test"], draws=draws).as_dict(),
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
        TrainingError: the folder is not a run's, has no whole checkpoint, or one that does not fit its configuration.
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
    _load_weights(model, checkpoint.weights(), folder)
    return LoadedRun(folder, config, task, model.eval(), checkpoint.step)


def _load_weights(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in wanted | found:
        if found.get(name) != wanted.get(name):
            sizes = f"{found.get(name, 'not there')} in the checkpoint, {wanted.get(name, 'not there')} in the model"
            raise TrainingError(f"{folder}: the checkpoint does not fit {CONFIG}: {name} is {sizes}")
    model.load_state_dict(weights)


def initial_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run started from."""
    return load_file(folder / INITIAL)


def _open_folder(config: ExperimentConfig, folder: Path, resume: bool) -> ExperimentConfig | None:
    """Make the folder, or check that it holds the same run; returns the configuration that it has so far."""
    path = folder / CONFIG
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        raise TrainingError(f"can't write to {folder}: {error.strerror or error}") from error
    if not path.exists():
        return None
    if not resume:
        raise TrainingError(f"{folder} holds a run already; --resume goes on with it, --name makes another")
    before = ExperimentConfig.from_file(path)
    changed = [change for key, change in _changes(before, config).items() if key not in MAY_CHANGE]
    if changed:
        raise TrainingError(f"{folder} was started with another configuration: {'; '.join(changed)}")
    return before


def _changes(before: ExperimentConfig, now: ExperimentConfig) -> dict[str, str]:
    """The fields that differ, with a sentence on each."""
    old, new = flatten(before.model_dump(mode="json")), flatten(now.model_dump(mode="json"))
    return {
        key: f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in old | new if old.get(key) != new.get(key)
    }


def _write_beginning(
    config: ExperimentConfig, before: ExperimentConfig | None, splits: Mapping[Split, Examples], folder: Path
) -> None:
    """Write what the run is made of; the configuration last, which makes the folder a run's.

    Raises:
        TrainingError: the run was made with other data.
    """
    data = {split: {"examples": len(examples), "sha256": examples.fingerprint()} for split, examples in splits.items()}
    path = folder / DATA
    if before is not None and path.exists():
        old = _read_fingerprints(path)
        changed = [
            f"{split} was {_sizes(old[split])}, is {_sizes(new)}" for split, new in data.items() if new != old[split]
        ]
        if changed:
            raise TrainingError(f"{folder} was started with other data: {'; '.join(changed)}")
    write_atomically(path, lambda target: target.write_text(json.dumps(data, indent=2) + "\n"))
    if before != config:
        # A result of fewer steps is not that of the run that now goes on.
        (folder / RESULT).unlink(missing_ok=True)
        write_atomically(folder / CONFIG, lambda target: target.write_text(config.to_json()))


def _read_fingerprints(path: Path) -> dict[str, Any]:
    try:
        fingerprints: dict[str, Any] = json.loads(path.read_text())
        for split in get_args(Split):
            _sizes(fingerprints[split])
    except (ValueError, TypeError, KeyError) as error:
        raise TrainingError(
            f"{path} is damaged; remove it to go on without a check that the data is the same"
        ) from error
    return fingerprints


def _sizes(split: Mapping[str, Any]) -> str:
    return f"{split['examples']:,} examples (sha256 {split['sha256'][:12]})"


def _note_other_schedule(config: ExperimentConfig, before: ExperimentConfig | None, reporter: Reporter) -> None:
    """Say so if the learning rates of a run that goes on are others than those of one of that length."""
    changed = [] if before is None else [text for key, text in _changes(before, config).items() if key in LENGTH]
    if changed and config.schedule.kind == "cosine":
        reporter.say(
            f"note: {'; '.join(changed)}. The cosine schedule depends on the last step and changes from here on: "
            "this is not the run that so many steps from the start would give"
        )


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
    folder: Path,
    reporter: Reporter,
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
