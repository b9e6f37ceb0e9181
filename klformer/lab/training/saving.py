"""What training saves and takes up again: the state to go on from, and the weights that are worth keeping."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from klformer.errors import RunError
from klformer.lab.training.callbacks import Callback
from klformer.lab.training.checkpoint import (
    OPTIMISER,
    WEIGHTS,
    Checkpoint,
    CheckpointStore,
    load_optimiser_tensors,
    optimiser_tensors,
    put_weights,
)
from klformer.lab.training.sharding import is_sharded, whole_weights


@dataclass
class Progress:
    """Where training is; saved with every checkpoint.

    Args:
        best_metric: The best value of the selecting metric on validation; None before the first.
        best_loss: The loss beside it.
        best_step: Its step.
        seconds: That the steps took, by a clock on the wall.
        processor_seconds: That processors worked on them, for this process; None if it began without counting.
    """

    step: int = 0
    best_metric: float | None = None
    best_loss: float = 1e30
    best_step: int = 0
    seconds: float = 0.0
    processor_seconds: float | None = 0.0
    tokens: int = 0


@dataclass
class StepTotals:
    """Sums over the steps since the last line of the log, over all processes; saved with every checkpoint."""

    loss: float = 0.0
    count: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0


class Saver:
    """Writes and reads the checkpoints of one training; one process writes."""

    def __init__(
        self,
        store: CheckpointStore,
        model: nn.Module,
        optimiser: Any,
        *,
        accelerator: Accelerator,
        callbacks: Sequence[Callback],
        keep: int,
    ) -> None:
        self.store = store
        self.model = model
        self.optimiser: torch.optim.Optimizer = getattr(optimiser, "optimizer", optimiser)
        self.accelerator = accelerator
        self.callbacks = callbacks
        self.keep = keep
        self._earlier: dict[Path, int] = {}

    def save(self, progress: Progress, totals: StepTotals) -> None:
        """Write everything that a run goes on from."""
        files = {}
        if self._takes_part:
            files = {WEIGHTS: whole_weights(self.model), OPTIMISER: optimiser_tensors(self.model, self.optimiser)}
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            info: dict[str, Any] = {
                "progress": vars(progress),
                "totals": vars(totals),
                "callbacks": {callback.name: callback.state() for callback in self.callbacks},
            }
            if scaler is not None:
                info["scaler"] = scaler.state_dict()
            self.store.save("step", progress.step, files, info)
            self.store.prune("step", self.keep, up_to=progress.step)
            self._remove_earlier(progress.step)
        self.accelerator.wait_for_everyone()

    @property
    def _takes_part(self) -> bool:
        """Whether this process makes what is saved: the one that writes, or all where weights are shared out."""
        return self.accelerator.is_main_process or is_sharded(self.model)

    def keep_weights(self, kind: str, step: int, info: Mapping[str, Any]) -> None:
        """Write the weights alone."""
        weights = whole_weights(self.model) if self._takes_part else {}
        if self.accelerator.is_main_process:
            folder = self.store.save(kind, step, {WEIGHTS: weights}, info)
            self._earlier.pop(folder, None)

    def keep_best(self, step: int, info: Mapping[str, Any]) -> None:
        """Write the weights as those of the best model so far."""
        self.keep_weights("best", step, info)
        if self.accelerator.is_main_process:
            self.store.prune("best", self.keep, up_to=step)

    def restore(self) -> tuple[Progress, StepTotals] | None:
        """Take up the newest whole checkpoint; None if there is none yet. What is newer is removed.

        Weights that were kept before there was a checkpoint are the only ones then. They stay until the run, which
        starts again, has come as far.
        """
        checkpoint = self.store.newest("step")
        best = self.store.newest("best")
        if checkpoint is None and best is not None and self.store.holds("step"):
            raise RunError(
                f"no checkpoint in {self.store.folder} is whole, so that the run can't go on; its best model, of step "
                f"{best.step}, is: `klformer eval {self.store.folder.parent}` reads it. Train again under another "
                "--name"
            )
        self.accelerator.wait_for_everyone()
        kinds = ("best", *(kind for callback in self.callbacks for kind in callback.checkpoint_kinds))
        if checkpoint is None:
            self._earlier = {found.folder: found.step for kind in kinds for found in self.store.whole(kind)}
            for folder in self._earlier:
                self.store.say(f"there is no checkpoint to go on from; {folder} is kept until the run is as far again")
            return None
        if self.accelerator.is_main_process:
            for kind in ("step", *kinds):
                self.store.remove_after(kind, checkpoint.step)
        try:
            return self._take_up(checkpoint)
        except (KeyError, TypeError) as error:
            raise RunError(
                f"{checkpoint.folder} is whole, but not what this version goes on from: {error!r}; remove it to go on "
                "from the one before it"
            ) from error

    def _take_up(self, checkpoint: Checkpoint) -> tuple[Progress, StepTotals]:
        self.load_weights(checkpoint)
        load_optimiser_tensors(self.model, self.optimiser, checkpoint.optimiser())
        for callback in self.callbacks:
            callback.load(checkpoint.info["callbacks"][callback.name])
        if self.accelerator.scaler is not None and "scaler" in checkpoint.info:
            self.accelerator.scaler.load_state_dict(checkpoint.info["scaler"])
        # A checkpoint that is older than the count of processor seconds does not know them.
        progress = {"processor_seconds": None} | checkpoint.info["progress"]
        return Progress(**progress), StepTotals(**checkpoint.info["totals"])

    def _remove_earlier(self, step: int) -> None:
        """Remove the weights of an earlier start that the run has passed by without writing them again."""
        for folder, reached in list(self._earlier.items()):
            if reached <= step:
                self.store.remove(folder, f"the run has come to step {step} again")
                del self._earlier[folder]

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Put the weights of a checkpoint into the model."""
        put_weights(self.model, checkpoint.weights(), checkpoint.folder)
