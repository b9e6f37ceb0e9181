"""The whole description of an experiment: one frozen tree, JSON in and out, unknown keys refused."""

from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from klformer.config import Config, describe_problems
from klformer.errors import ArgumentError
from klformer.models import AttentionSpec, ModelConfig
from klformer.tasks import TASKS, DataConfig
from klformer.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig


class ExperimentConfig(Config):
    """Everything that a run depends on."""

    task: str
    preset: str
    attention: AttentionSpec
    data: DataConfig
    model: ModelConfig
    optimiser: OptimiserConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    seed: int = Field(0, ge=0)

    @field_validator("task")
    @classmethod
    def _known(cls, name: str) -> str:
        return TASKS.check(name)

    @field_validator("attention")
    @classmethod
    def _complete(cls, attention: AttentionSpec) -> AttentionSpec:
        """With all options: a default that changes later must not change a run that is loaded then."""
        return attention.complete()

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_file(path: Path) -> "ExperimentConfig":
        """Read what `to_json` wrote.

        Raises:
            ValueError: the file is not a valid configuration; the message names it and what is wrong.
        """
        try:
            return ExperimentConfig.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ArgumentError(f"{path}: {describe_problems(error)}") from error
