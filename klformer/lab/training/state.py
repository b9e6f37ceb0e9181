"""Where training is: what a checkpoint saves besides weights and optimiser."""

from dataclasses import dataclass, field


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
