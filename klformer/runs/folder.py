"""The folder of a run: who may go on in it, and what it is made of.

    runs/<name>/   config.json  data.json  metrics.jsonl  tensorboard/  initial.safetensors  checkpoints/  result.json

config.json is written when data and model are there, just before the first step: what fails earlier leaves no run.
Everything later (evaluation, comparison, analysis, reports) reads such folders and nothing else.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from klformer.data import Examples
from klformer.errors import RunError
from klformer.files import write_text
from klformer.runs.config import ExperimentConfig
from klformer.tasks import Split

CONFIG, DATA, INITIAL, RESULT = "config.json", "data.json", "initial.safetensors", "result.json"
#: Fields that say how long a run is.
LENGTH = {"training.max_steps", "training.max_epochs"}
#: Fields in which a resumed run may differ from what it was started with. The data may be in another place, but not
#: other data: that is told by its fingerprint.
MAY_CHANGE = LENGTH | {"training.target_accuracy", "training.keep_checkpoints", "training.log_every", "data.root"}

#: What file systems without locks for folders say, as those of some networks are.
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}


def make_folder(folder: Path) -> None:
    """Make the folder of a run, or see that it can be written.

    Raises:
        RunError: it can't.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        raise RunError(f"can't write to {folder}: {error.strerror or error}") from error


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Keep others from training in the same folder meanwhile, where the file system has locks.

    Raises:
        RunError: somebody does already.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunError(f"another process is training in {folder}; wait for it, or give another --name") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(descriptor)
            raise
    try:
        yield
    finally:
        os.close(descriptor)


def configuration_so_far(config: ExperimentConfig, folder: Path, *, resume: bool) -> ExperimentConfig | None:
    """The configuration of the run that a folder holds, if any.

    Raises:
        RunError: it is another run, or not to be gone on with.
    """
    path = folder / CONFIG
    if not path.exists():
        return None
    if not resume:
        raise RunError(f"{folder} holds a run already; --resume goes on with it, --name makes another")
    before = ExperimentConfig.from_file(path)
    changed = [change for key, change in changes(before, config).items() if key not in MAY_CHANGE]
    if changed:
        raise RunError(f"{folder} was started with another configuration: {'; '.join(changed)}")
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
        RunError: the run was made with other data.
    """
    if before is not None:
        check_same_data(folder, splits)
    fingerprints = {split: _fingerprint(examples) for split, examples in splits.items()}
    write_text(folder / DATA, json.dumps(fingerprints, indent=2) + "\n")
    if before != config:
        # A result of fewer steps is not that of the run that now goes on.
        (folder / RESULT).unlink(missing_ok=True)
        write_text(folder / CONFIG, config.to_json())


def check_same_data(folder: Path, splits: Mapping[Split, Examples]) -> None:
    """Compare data with that of a run; a run without a record of it is taken at its word.

    Raises:
        RunError: it is other data, or the record is damaged.
    """
    path = folder / DATA
    if not path.exists():
        return
    try:
        recorded = json.loads(path.read_bytes())
        pairs = {split: (_sizes(recorded[split]), _sizes(_fingerprint(splits[split]))) for split in splits}
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is damaged; remove it to go on without a check that the data is the same") from error
    changed = [f"{split} was {was}, is {now}" for split, (was, now) in pairs.items() if was != now]
    if changed:
        raise RunError(f"{folder} was started with other data: {'; '.join(changed)}")


def _fingerprint(examples: Examples) -> dict[str, Any]:
    return {"examples": len(examples), "sha256": examples.fingerprint()}


def _sizes(split: Mapping[str, Any]) -> str:
    return f"{split['examples']:,} examples (sha256 {split['sha256'][:12]})"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one, with dots in the names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
