"""What a conversion has learned so far, in a file, so that it can go on after an interruption. Nothing is unpickled."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from klformer.errors import FileError
from klformer.files import replacing

ENTRY = "klformer"
Stage = Literal["fit", "align", "distil"]


@dataclass(frozen=True)
class State:
    """What is trained, and its optimisers, after so many steps of a stage."""

    stage: Stage
    step: int
    tensors: dict[str, Tensor]
    #: What is not a tensor, for JSON.
    rest: dict[str, Any]


class Store:
    """Saves the state of a conversion, and gives it back to one with the same settings.

    Args:
        file: Where it is; in one stroke there is another state in it.
        settings: What must be equal for a state to be taken up again, for JSON.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self._file = file
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))

    def save(self, state: State) -> None:
        """Raises FileError if it can't be written; the state before is whole then."""
        entry = json.dumps({"settings": self._settings, "stage": state.stage, "step": state.step, "rest": state.rest})
        with replacing(self._file) as temporary:
            tensors = {name: tensor.detach().contiguous() for name, tensor in state.tensors.items()}
            save_file(tensors, temporary, metadata={ENTRY: entry})

    def load(self) -> State | None:
        """The state, or None if there is none.

        Raises:
            FileError: the state is that of another conversion, or damaged.
        """
        if not self._file.exists():
            return None
        try:
            entry = _entry(self._file)
            tensors = load_file(self._file)
            settings = entry["settings"]
            state = State(entry["stage"], entry["step"], tensors, entry["rest"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"can't read {self._file}: {error}; remove it to begin again") from error
        if different := [name for name, value in self._settings.items() if settings.get(name) != value]:
            raise FileError(
                f"{self._file} is of a conversion with other settings ({', '.join(different)}): give those, or remove "
                "it to begin again"
            )
        return state


def saved_step(file: Path) -> str | None:
    """Return how far the state in a file has got, in words; None if it has none that can be read."""
    try:
        entry = _entry(file)
        return f"step {entry['step']} of {entry['stage']}"
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def _entry(file: Path) -> Any:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()[ENTRY])
