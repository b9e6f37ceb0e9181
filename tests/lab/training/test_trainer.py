"""What a trainer refuses before anything is trained."""

from types import SimpleNamespace

import pytest
import torch

from klformer.lab.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig
from klformer.lab.training.objectives import Classification
from klformer.lab.training.progress import SilentReporter
from klformer.lab.training.trainer import Trainer


def test_fp16_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match=r"training\.mixed_precision must be 'no' or 'bf16' on a CPU, got 'fp16'"):
        Trainer(
            torch.nn.Identity(),
            None,
            None,
            objective=Classification(num_classes=2),
            optimiser=OptimiserConfig(),
            schedule=ScheduleConfig(),
            training=TrainingConfig(max_steps=1, mixed_precision="fp16"),
            store=None,
            open_log=None,
            accelerator=SimpleNamespace(device=torch.device("cpu")),
            reporter=SilentReporter(),
            seed=0,
        )
