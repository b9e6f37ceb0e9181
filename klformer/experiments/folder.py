"""The folder of a run: who may go on in it, and what it is made of.

    runs/<name>/   config.json  data.json  metrics.jsonl  tensorboard/  initial.safetensors  checkpoints/  result.json

config.json is written when data and model are there, just before the first step: what fails earlier leaves no run.
Everything later (evaluation, comparison, analysis, reports) reads such folders and nothing else.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from klformer.experiments.config import ExperimentConfig
from klformer.tasks import Examples, Split
from klformer.training.errors import TrainingError
from klformer.training.files import write_atomically

CONFIG, DATA, INITIAL, RESULT = "config.json", "data.json", "initial.safetensors", "result.json"
#: Fields that say how long a run is.
LENGTH = {"training.max_steps", "training.max_epochs"}
#: Fields in which a resumed run may differ from what it was started with. The data may be in another place, but not
#: other data: that is told by its fingerprint.
MAY_CHANGE = LENGTH | {"training.target_accuracy", "training.keep_checkpoints", "training.log_every", "data.root"}


def open_folder(config: ExperimentConfig, folder: Path, resume: bool) -> ExperimentConfig | None:
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
    changed = [change for key, change in changes(before, config).items() if key not in MAY_CHANGE]
    if changed:
        raise TrainingError(f"{folder} was started with another configuration: {'; '.join(changed)}")
    return before


def changes(before: ExperimentConfig, now: ExperimentConfig) -> dict[str, str]:
    """The fields that differ, with a sentence on each."""
    old, new = flatten(before.model_dump(mode="json")), flatten(now.model_dump(mode="json"))
    return {
        key: f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in old | new if old.get(key) != new.get(key)
    }


def write_beginning(
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, with dots in the names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
