"""Learning rates by step, t = 1, 2, ..., T: functions of the step alone, so that there is no state to save."""

import math

from klformer.lab.training.config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, base: float, step: int, total_steps: int) -> float:
    """The learning rate of step t = `step`.

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
