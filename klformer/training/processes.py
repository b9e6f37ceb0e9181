"""One process or several: what accelerate and torchrun make of them."""

import torch
from accelerate import Accelerator, PartialState

from klformer.training.config import TrainingConfig


def make_accelerator(training: TrainingConfig) -> Accelerator:
    """Device, processes and precision: what torchrun says, else one process."""
    return Accelerator(mixed_precision=training.mixed_precision, cpu=not torch.cuda.is_available())


def is_main_process() -> bool:
    """Whether this is the only process, or the one of several that writes and speaks."""
    return PartialState(cpu=not torch.cuda.is_available()).is_main_process


def leave_processes() -> None:
    """End what the processes of torchrun talk through: left to the interpreter's end, its threads can abort one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
