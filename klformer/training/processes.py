"""One process or several: what accelerate and torchrun make of them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

from klformer.errors import OtherProcessFailedError
from klformer.training.config import TrainingConfig

Result = TypeVar("Result")


def make_accelerator(training: TrainingConfig) -> Accelerator:
    """Device, processes and precision: what torchrun says, else one process."""
    return Accelerator(mixed_precision=training.mixed_precision, cpu=not torch.cuda.is_available())


def is_main_process() -> bool:
    """Whether this is the only process, or the one of several that writes and speaks."""
    return PartialState(cpu=not torch.cuda.is_available()).is_main_process


def is_distributed() -> bool:
    """Whether torchrun has started several processes."""
    return PartialState(cpu=not torch.cuda.is_available()).num_processes > 1


def on_main_process(do: Callable[[], Result]) -> Result:
    """Let the main process do something; all get its result.

    Raises:
        OtherProcessFailedError: in the other processes, if it failed there. Its own error is raised in the main one.
    """
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
