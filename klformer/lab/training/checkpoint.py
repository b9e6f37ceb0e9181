"""Checkpoints that are whole or not there: tensors as safetensors, the rest as JSON, nothing pickled.

    checkpoints/step-00000500/   weights.safetensors, optimiser.safetensors, manifest.json      to go on from
    checkpoints/best-00000400/   weights.safetensors, manifest.json                             to evaluate

A checkpoint is written to a temporary folder, synced to disk and renamed; the manifest holds the SHA-256 of every
file, and of itself. A folder without a manifest, or with a file that does not match it, is torn or tampered with, and
passed over with a message.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from klformer.errors import FileError, RunError
from klformer.files import check_regular, parse_json, sha256, sync, writing
from klformer.lab.training.sharding import placed_like, shared_like, whole

WEIGHTS, OPTIMISER, MANIFEST = "weights.safetensors", "optimiser.safetensors", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    step: int
    info: dict[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """Raises RunError if they can't be read, though the checksum is theirs."""
        return read_weights(self.folder / WEIGHTS)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights, from the header of their file. Raises as `weights`."""
        with _reading(self.folder / WEIGHTS), safe_open(self.folder / WEIGHTS, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def optimiser(self) -> dict[str, Tensor]:
        """Raises as `weights`."""
        return read_weights(self.folder / OPTIMISER)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, for whom the umask says.

    safetensors makes files that only their owner may read; colleagues share folders of runs.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(mode)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file."""
    with _reading(path):
        return load_file(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        check_regular(path)
        yield
    except FileNotFoundError as error:
        raise RunError(f"{path} is not there") from error
    except SafetensorError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def put_weights(model: nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Put weights into a model."""
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_shapes(found, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, source)
    if broken := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
        raise RunError(f"{source} has weights that are not finite numbers, such as {broken[0]}: it can tell nothing")
    model.load_state_dict(shared_like(weights, model))


def check_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Raises RunError unless the shapes of weights from `source` are those of the model."""
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            sizes = f"{found.get(name, 'not there')} in it, {wanted.get(name, 'not there')} in the model"
            raise RunError(f"{source} does not fit the configuration: {name} is {sizes}")


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say

    def save(self, kind: str, step: int, files: Mapping[str, Mapping[str, Tensor]], info: Mapping[str, Any]) -> Path:
        """Write a checkpoint of `kind` ("step", "best" or what a callback keeps) in one stroke.

        Raises:
            FileError: the disk is full or the folder can't be written; nothing is left behind then.
        """
        target = self.folder / _name(kind, step)
        temporary = self.folder / f".{target.name}.{os.getpid()}.tmp"
        try:
            with writing(target):
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                digests = {}
                for name, tensors in files.items():
                    save_tensors(tensors, temporary / name)
                    sync(temporary / name)
                    digests[name] = sha256(temporary / name)
                manifest = {"step": step, "files": digests, "info": dict(info)}
                sealed = manifest | {"sha256": _digest_of(manifest)}
                (temporary / MANIFEST).write_text(json.dumps(sealed, indent=2) + "\n")
                sync(temporary / MANIFEST)
                if target.exists():
                    shutil.rmtree(target)
                os.rename(temporary, target)
                sync(self.folder)
        except FileError as error:
            raise FileError(f"{error}. {self._what_is_safe()}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    def newest(self, kind: str, *, up_to: int | None = None) -> Checkpoint | None:
        """Return the newest whole checkpoint of a kind, up to a step; those that are not whole are named and passed
        over."""
        for folder in reversed(self._folders(kind, up_to)):
            try:
                return _open(folder)
            except _NotWhole as problem:
                self.say(f"checkpoint {folder} is not whole ({problem}); using the one before it")
        return None

    def whole(self, kind: str) -> list[Checkpoint]:
        """Return all whole checkpoints of a kind, oldest first; those that are not are named and passed over."""
        found = []
        for folder in self._folders(kind):
            try:
                found.append(_open(folder))
            except _NotWhole as problem:
                self.say(f"checkpoint {folder} is not whole ({problem})")
        return found

    def holds(self, kind: str) -> bool:
        """Return whether there are checkpoints of a kind, whole or not."""
        return bool(self._folders(kind))

    def is_last(self, checkpoint: Checkpoint, kind: str) -> bool:
        """Return whether no newer one of its kind was written, whole or not."""
        return self._folders(kind)[-1] == checkpoint.folder

    def remove_after(self, kind: str, step: int) -> None:
        """Remove what is newer than the step that a run goes on from: it is torn, or will be made again."""
        for folder in self._folders(kind)[len(self._folders(kind, step)) :]:
            self.remove(folder, f"the run goes on from step {step}")

    def remove(self, folder: Path, reason: str) -> None:
        """Remove a checkpoint, and say so."""
        shutil.rmtree(folder)
        self.say(f"removed {folder}, {reason}")

    def prune(self, kind: str, keep: int, *, up_to: int) -> None:
        """Remove all but the newest `keep` of a kind up to a step, and what interrupted writes left behind."""
        for folder in self._folders(kind, up_to)[:-keep]:
            shutil.rmtree(folder)
        for leftover in self.folder.glob(f".{kind}-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _folders(self, kind: str, up_to: int | None = None) -> list[Path]:
        """Return the folders of a kind, whole or not, oldest first."""
        last = None if up_to is None else _name(kind, up_to)
        ours = re.compile(f"{kind}-[0-9]{{8}}")
        found = [folder for folder in self.folder.glob(f"{kind}-*") if ours.fullmatch(folder.name) and folder.is_dir()]
        return sorted(folder for folder in found if last is None or folder.name <= last)

    def _what_is_safe(self) -> str:
        newest = self.newest("step")
        return "There is no earlier checkpoint." if newest is None else f"The last good checkpoint is {newest.folder}."


def _name(kind: str, step: int) -> str:
    return f"{kind}-{step:08d}"


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class _NotWhole(Exception):  # noqa: N818 - found and passed over
    """What is wrong with a checkpoint."""


def _open(folder: Path) -> Checkpoint:
    """Open the checkpoint in a folder, if it is as it was written."""
    try:
        manifest = parse_json(check_regular(folder / MANIFEST).read_bytes())
        if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest_of(manifest):
            raise _NotWhole(f"{MANIFEST} does not match its checksum")
        for name, digest in _files_of(manifest).items():
            if sha256(folder / name) != digest:
                raise _NotWhole(f"{name} does not match its checksum")
    except ValueError as error:
        raise _NotWhole(f"{MANIFEST} is not readable") from error
    except FileNotFoundError as error:
        raise _NotWhole(f"{Path(str(error.filename)).name} is missing") from error
    except (OSError, FileError) as error:
        raise _NotWhole(str(error)) from error
    return Checkpoint(folder, manifest["step"], manifest["info"])


def _files_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files of a manifest, if it is one: a checksum says who wrote it, not what."""
    step, files, info = (manifest.get(key) for key in ("step", "files", "info"))
    if type(step) is not int or not isinstance(info, dict) or not isinstance(files, dict):
        raise _NotWhole(f"{MANIFEST} lacks step, files or info")
    if WEIGHTS not in files or not files.keys() <= {WEIGHTS, OPTIMISER}:
        raise _NotWhole(f"{MANIFEST} must name {WEIGHTS}, and nothing but it and {OPTIMISER}")
    return files


def optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state by the names of the parameters, as tensors."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}|{key}": whole(torch.as_tensor(value))
        for parameter, state in optimiser.state.items()
        for key, value in state.items()
    }


def load_optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimiser_tensors` gave."""
    parameters = dict(model.named_parameters())
    optimiser.state.clear()
    for name, tensor in tensors.items():
        parameter_name, key = name.rsplit("|", 1)
        parameter = parameters[parameter_name]
        # AdamW counts steps in a tensor that stays on the CPU.
        optimiser.state[parameter][key] = tensor if key == "step" else placed_like(tensor, parameter.data)
