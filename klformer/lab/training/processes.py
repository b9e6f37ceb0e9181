"""One process or several: what accelerate and torchrun make of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from klformer.errors import ArgumentError, OtherProcessFailedError
from klformer.lab.data import Batch
from klformer.lab.data.sequences import IntArray
from klformer.lab.training.config import ParallelConfig, TrainingConfig

Result = TypeVar("Result")


def make_accelerator(training: TrainingConfig) -> Accelerator:
    """Make what knows device, processes and precision: what torchrun says, else one process."""
    return Accelerator(mixed_precision=training.mixed_precision, cpu=not torch.cuda.is_available())


@dataclass(frozen=True)
class Layout:
    """Who of the processes does what: which share of the examples, and which part of their sequences.

    Args:
        num_shares: Processes that share the examples; each of them is `num_parts` that share the sequences.
        share_index: Which share this process has.
        num_parts: Parts of a sequence.
        part_index: Which part this process has.
        mesh: The processes by both, if sequences are in parts.
        shards: All processes in a row, if weights are shared out.
    """

    num_shares: int = 1
    share_index: int = 0
    num_parts: int = 1
    part_index: int = 0
    mesh: DeviceMesh | None = None
    shards: DeviceMesh | None = None

    def share(self, indices: IntArray) -> IntArray:
        """Return the examples of this process; the others of its sequences have the same."""
        return np.array_split(indices, self.num_shares)[self.share_index]

    def part(self, batch: Batch, *, of_positions: bool) -> tuple[Batch, int]:
        """Return the part of a batch that this process has, and where it begins."""
        if self.num_parts == 1:
            return batch, 0
        return batch.part(self.part_index, self.num_parts, of_positions=of_positions)


def make_layout(accelerator: Accelerator, parallel: ParallelConfig | None = None) -> Layout:
    """Decide how the processes share the work."""
    world, num_parts = accelerator.num_processes, 1 if parallel is None else parallel.sequence
    if world % num_parts:
        raise ArgumentError(
            f"parallel.sequence={num_parts} needs {num_parts} processes or a multiple, got {world}: "
            f"torchrun --nproc-per-node {num_parts} -m klformer ..."
        )
    share, part = divmod(accelerator.process_index, num_parts)
    device, mesh, shards = accelerator.device.type, None, None
    if num_parts > 1:
        mesh = init_device_mesh(device, (world // num_parts, num_parts), mesh_dim_names=("data", "sequence"))
    if parallel is not None and parallel.shard:
        if world == 1:
            raise ArgumentError(
                "parallel.shard needs processes to share with: torchrun --nproc-per-node 2 -m klformer ..."
            )
        shards = init_device_mesh(device, (world,), mesh_dim_names=("shards",))
    return Layout(world // num_parts, share, num_parts, part, mesh, shards)


def is_main_process() -> bool:
    """Return whether this is the only process, or the one of several that writes and speaks."""
    return PartialState(cpu=not torch.cuda.is_available()).is_main_process


def is_distributed() -> bool:
    """Return whether torchrun has started several processes."""
    return PartialState(cpu=not torch.cuda.is_available()).num_processes > 1


def on_main_process(do: Callable[[], Result]) -> Result:
    """Let the main process do something; all get its result."""
    outcome: list[Any] = [None]
    if is_main_process():
        try:
            outcome[0] = do()
        except Exception:
            broadcast_object_list([OtherProcessFailedError()])
            raise
    broadcast_object_list(outcome)
    if isinstance(outcome[0], OtherProcessFailedError):
        raise outcome[0]
    result: Result = outcome[0]
    return result


def leave_processes() -> None:
    """End what the processes of torchrun talk through: left to the interpreter's end, its threads can abort one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
