"""Weights that a run takes over from another one: embedding and encoder; its head is its own.

A pretrained run may know more tokens (the mask comes after a task's own) and longer sequences: of both the first ones
are taken. Everything else must be the same, and what is not is named by its field.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from klformer.errors import RunError
from klformer.lab.runs.config import Changes, ExperimentConfig, longest_in
from klformer.lab.runs.folder import RunFolder
from klformer.lab.tasks import TASKS
from klformer.lab.tasks.base import Knowledge

#: What two models must have in common, if one is to start from the other.
SAME = (
    "num_layers", "num_heads", "model_dim", "ffn_dim", "head_dim", "positions", "convolution_width", "activation",
    "pooling",
)  # fmt: skip
#: Tables of which the first rows are taken.
_TABLES = ("embedding.inputs.weight", "embedding.positions")
_PARTS = ("embedding.", "encoder.")


def settings_to_start_from(source: ExperimentConfig, preset: str, task: str) -> Changes:
    """Return what replaces the settings of a preset, so that a run of a task can start from another one's weights."""
    longest = min(source.data.max_len or TASKS[source.task].default_max_len, longest_in(preset, task))
    return {"model": {name: getattr(source.model, name) for name in SAME}, "data": {"max_len": longest}}


class PretrainedRun:
    """A run to start from."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.run = RunFolder(folder)
        self.config = self.run.config()
        self.knowledge: Knowledge = self.run.knowledge()
        store = self.run.checkpoints(say)
        checkpoint = store.newest("best") or store.newest("step")
        if checkpoint is None:
            raise RunError(f"{folder} has no whole checkpoint to start from")
        self._checkpoint = checkpoint

    def check_fits(self, config: ExperimentConfig) -> None:
        """Compare the configurations."""
        theirs, ours = self.config.model, config.model
        fields = [name for name in SAME if getattr(theirs, name) != getattr(ours, name)]
        wrong = [
            f"model.{name} is {getattr(ours, name)!r}, in the run {getattr(theirs, name)!r} (--model.{_flag(name)})"
            for name in fields
        ]
        if self.config.attention != config.attention:
            wrong.append(
                f"attention is {config.attention.label()}, in the run {self.config.attention.label()} (--attention)"
            )
        if wrong:
            raise RunError(f"{self.run} can't be started from: {'; '.join(wrong)}")

    def give(self, model: nn.Module) -> str:
        """Put embedding and encoder into a model; returns what was and what was not taken."""
        theirs, ours = self._checkpoint.weights(), model.state_dict()
        taken: dict[str, Tensor] = {}
        cut = []
        for name, wanted in ours.items():
            if not name.startswith(_PARTS):
                continue
            tensor = self._rows(name, theirs.get(name), wanted)
            if len(tensor) < len(theirs[name]):
                cut.append(f"{len(tensor):,} of {len(theirs[name]):,} rows of {name}")
            taken[name] = tensor
        with torch.no_grad():
            model.load_state_dict(ours | taken)
        fresh = sorted({name.split(".")[0] for name in ours if name not in taken})
        parts = f"embedding and encoder ({sum(tensor.numel() for tensor in taken.values()):,} numbers"
        some = f"; {', '.join(cut)}" if cut else ""
        return f"from {self.run}, step {self._checkpoint.step}: {parts}{some}); fresh: {', '.join(fresh)}"

    def _rows(self, name: str, found: Tensor | None, wanted: Tensor) -> Tensor:
        """Return the tensor in the size that is wanted."""
        if found is not None and found.shape == wanted.shape:
            return found
        if found is not None and name in _TABLES and found.shape[1:] == wanted.shape[1:] and len(found) > len(wanted):
            return found[: len(wanted)].clone()
        remedy = {
            "embedding.positions": "; sequences must not be longer than the run's (--data.max-len)",
            "embedding.inputs.weight": "; tokens must be those of the run (--data.tokens.*)",
        }.get(name, "")
        size = "not there" if found is None else tuple(found.shape)
        raise RunError(f"{self.run} can't be started from: {name} is {size} in it, {tuple(wanted.shape)} here{remedy}")


def _flag(field: str) -> str:
    return field.replace("_", "-")
