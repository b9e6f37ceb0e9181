"""Learning rates by step, and AdamW with groups of parameters: kernels, norms and biases, and everything else."""

import math
from typing import Any

import torch
from torch import nn

from klformer.kernels import Kernel, SpectralDistribution
from klformer.lab.training.config import OptimiserConfig, ScheduleConfig
from klformer.lab.training.encoder_classifier import EncoderClassifier


def learning_rate(schedule: ScheduleConfig, base: float, step: int, total_steps: int) -> float:
    """Return the learning rate of step t = `step`.

    Args:
        base: Base learning rate.
        step: 1 for the first.
        total_steps: The last step T, at which "cosine" and "linear" reach 0.
    """
    warmup = max(schedule.warmup_steps, round(schedule.warmup_fraction * total_steps))
    if schedule.kind == "rsqrt":
        # Without warm-up LRA's formula is base / sqrt(t).
        return base * min(1.0, step / max(1, warmup)) / math.sqrt(max(step, warmup, 1))
    if step < warmup:
        return base * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if schedule.kind == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * progress))
    return base * (1 - progress) if schedule.kind == "linear" else base


NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def build_optimiser(model: nn.Module, config: OptimiserConfig) -> torch.optim.AdamW:
    """Build AdamW over all parameters that are trained."""
    return torch.optim.AdamW(
        parameter_groups(model, config),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Give every group its share of the schedule's rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group["rate_factor"]


def parameter_groups(model: nn.Module, config: OptimiserConfig) -> list[dict[str, Any]]:
    """Group parameters with the same weight decay and factor of the learning rate, in the model's order: one group if
    there is nothing to tell them apart."""
    encoder = "encoder." if isinstance(model, EncoderClassifier) else None
    kernel, plain = kernel_parameters(model), norms_and_biases(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor, decay = 1.0, config.weight_decay
        if name in plain and not config.decay_norms_and_biases:
            decay = 0.0
        if name in kernel:
            factor = config.kernel_learning_rate_factor
            decay = decay if config.kernel_weight_decay is None else config.kernel_weight_decay
        if encoder is not None and name.startswith(encoder):
            factor *= config.encoder_learning_rate / config.learning_rate
        groups.setdefault((factor, decay), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor}
        for (factor, decay), parameters in groups.items()
    ]


def kernel_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that the kernels are learned by: those of spectral distributions, and the
    smoothing and temperature of kernels."""
    return _names(model, (Kernel, SpectralDistribution), recurse=True)


def norms_and_biases(model: nn.Module) -> set[str]:
    """Return the names of the parameters that shift and scale: those of norms, and biases."""
    biases = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    return _names(model, NORMS, recurse=False) | biases


def _names(model: nn.Module, kinds: tuple[type[nn.Module], ...], *, recurse: bool) -> set[str]:
    """Return the names, in the model, of the parameters of modules of some kinds."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, kinds)
        for name, _ in module.named_parameters(recurse=recurse)
    }
