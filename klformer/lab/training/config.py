"""What a user can choose about training. Field docstrings are the help of the command line."""

from typing import Literal

from pydantic import Field, model_validator

from klformer.config import Config
from klformer.errors import ArgumentError


class OptimiserConfig(Config):
    """AdamW."""

    learning_rate: float = Field(1e-3, gt=0)
    """Base learning rate; what the schedule makes of it is in `schedule`."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the second moment."""

    eps: float = Field(1e-9, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay."""

    decay_norms_and_biases: bool = True
    """Whether norms and biases decay as well."""

    kernel_learning_rate_factor: float = Field(1.0, gt=0)
    """The kernels' own parameters learn so many times as fast as the others."""

    encoder_learning_rate: float = Field(0.0, ge=0)
    """Base learning rate of a pretrained encoder (--encoder). At 0 it stays as it is, and the head alone learns."""

    kernel_weight_decay: float | None = Field(0.0, ge=0)
    """Weight decay of the kernels' own parameters; as the others if None, which is the paper's."""


class ScheduleConfig(Config):
    """How the learning rate goes with the step t = 1, 2, ..."""

    kind: Literal["constant", "rsqrt", "cosine", "linear"] = "constant"
    """rsqrt: base * min(1, t / warmup) / sqrt(max(t, warmup)), Long Range Arena's; its peak is base / sqrt(warmup).
    cosine: linear warm-up to base, then cosine decay to 0 at the last step. linear: the same with a straight line.
    constant: linear warm-up, then base."""

    warmup_steps: int = Field(0, ge=0)
    """Steps of warm-up."""

    warmup_fraction: float = Field(0.0, ge=0, lt=1)
    """The same as a share of all steps; the longer of the two counts."""


class ParallelConfig(Config):
    """How the processes of torchrun share the work. A run can go on with another number of them."""

    sequence: int = Field(1, ge=1)
    """Cut every sequence into so many parts, one a process; the processes that are left share the examples. For kernel
    attentions."""

    shard: bool = False
    """Share out weights, gradients and the optimiser's averages over all processes (FSDP2), for models that do not fit
    one; how far kernels move is not measured then."""

    patience: float = Field(45.0, gt=0)
    """End if another process has sent nothing for so many seconds, as after a crash or a cut cable."""


class TrainingConfig(Config):
    """The loop."""

    batch_size: int = Field(32, ge=1)
    """Examples a step, over all processes and accumulated parts."""

    accumulation: int = Field(1, ge=1)
    """Work through a batch in so many parts, to save memory; the result is the same, with dropout in distribution:
    it is drawn for each part."""

    max_steps: int | None = Field(None, ge=1)
    """Stop after so many steps."""

    max_epochs: int | None = Field(None, ge=1)
    """Stop after so many passes through the training set."""

    target: float | None = None
    """Stop as soon as the selecting metric on validation, accuracy for classes, is this good."""

    clip_norm: float | None = Field(None, gt=0)
    """Clip the norm of the gradient to this."""

    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Precision of matrix products outside of the kernels' features, which are always in float32."""

    resample_every: int | None = Field(100, ge=1)
    """Draw new frequencies every so many steps (the paper: 100); never if None."""

    evaluate_every: int = Field(500, ge=1)
    """Evaluate on the validation set every so many steps, and at the end."""

    checkpoint_every: int = Field(500, ge=1)
    """Write a checkpoint every so many steps, and at the end."""

    checkpoint_seconds: float | None = Field(30.0, gt=0)
    """Write a checkpoint also when the last one is so many seconds old; never because of that if None. If writing takes
    long, it is done less often, so that training does not wait for it more than a twentieth of the time."""

    keep_checkpoints: int = Field(2, ge=1)
    """Keep so many of the newest checkpoints, and as many of the best ones."""

    keep_milestones: bool = False
    """Keep the weights with which the validation accuracy first reached 20, 40, 60 and 80%, for `analyze gradients`."""

    evaluation_batch_size: int = Field(64, ge=1)
    """Examples a batch in evaluation, over all processes."""

    evaluation_draws: int = Field(10, ge=1)
    """Draws of the frequencies in the final evaluation, for mean, deviation and vote."""

    log_every: int = Field(10, ge=1)
    """Write loss and metrics of training every so many steps."""

    pad_to_longest: bool = False
    """Pad every batch to the longest sequence of the training set, for comparison; wasteful."""

    @model_validator(mode="after")
    def _ends(self) -> "TrainingConfig":
        if self.max_steps is None and self.max_epochs is None:
            raise ArgumentError("give max_steps or max_epochs, or training never ends")
        return self
