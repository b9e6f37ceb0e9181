"""Learning rates: of several that are tried, the one that is best on validation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.naming import selecting_metric
from klformer.lab.training.metrics import Metric

FIELD = "optimiser.learning_rate"


def at_rate(config: ExperimentConfig, rate: float) -> ExperimentConfig:
    """Return the same run with another learning rate."""
    optimiser = config.optimiser.model_copy(update={"learning_rate": rate})
    return config.model_copy(update={"optimiser": optimiser})


def apart_from_rate(config: ExperimentConfig) -> str:
    """Return what runs that differ in learning rate and seed alone have in common."""
    return at_rate(config, 1.0).model_copy(update={"seed": 0}).model_dump_json()


def best_rate(tried: Mapping[float, Mapping[str, Any]]) -> float:
    """Return the learning rate that is best on validation; of equal ones, the largest."""
    return _highest({rate: _rank(result) for rate, result in tried.items()})


def rank_on_validation(metric: Metric, value: float | None) -> float:
    """Return a rank, the higher the better; what is no number is worst."""
    return -math.inf if value is None or math.isnan(value) else metric.rank(value)


def _rank(result: Mapping[str, Any]) -> float:
    return rank_on_validation(selecting_metric(result), result["validation"].get(result["metric"]))


def _highest(ranks: Mapping[float, float]) -> float:
    return max(ranks, key=lambda rate: (ranks[rate], rate))


def on_validation(result: Mapping[str, Any]) -> float:
    """Return the metric that a run was selected by, on validation."""
    value = result["validation"][result["metric"]]
    return float(value)


def choice(runs: Sequence[tuple[int, float, float]]) -> tuple[float, list[float]] | None:
    """Return the learning rate that is chosen by the first seed that was run with several, and those it was chosen
    from; None if there is no such seed.

    Args:
        runs: Seed, learning rate and rank on validation, the higher the better, of every finished run of one model.
    """
    by_seed: dict[int, dict[float, float]] = {}
    for seed, rate, rank in runs:
        by_seed.setdefault(seed, {})[rate] = rank
    first = next((by_seed[seed] for seed in sorted(by_seed) if len(by_seed[seed]) > 1), None)
    return None if first is None else (_highest(first), sorted(first))


def at_chosen_rates(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Leave out runs of learning rates that were tried and not chosen, as `klformer compare --learning-rates` makes
    them.

    The choice is among runs that are finished.
    """
    models: dict[str, list[tuple[int, float, Mapping[str, Any]]]] = {}
    for folder in folders:
        if (result := folder.result()) is not None:
            config = folder.config()
            run = (config.seed, config.optimiser.learning_rate, result)
            models.setdefault(apart_from_rate(config), []).append(run)
    chosen = {}
    for model, runs in models.items():
        if len({rate for _, rate, _ in runs}) > 1:
            chosen[model] = choice([(seed, rate, _rank(result)) for seed, rate, result in runs])

    def is_taken(folder: RunFolder) -> bool:
        config = folder.config()
        found = chosen.get(apart_from_rate(config))
        return found is None or found[0] == config.optimiser.learning_rate

    return [folder for folder in folders if is_taken(folder)]
