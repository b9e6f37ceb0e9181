"""What differs between two configurations, and what of it a run that goes on may have changed."""

from collections.abc import Mapping
from typing import Any

from klformer.lab.runs.config import ExperimentConfig

#: Fields that say how long a run is.
LENGTH = {"training.max_steps", "training.max_epochs"}
#: Fields in which a resumed run may differ from what it was started with. The data may be in another place, but not
#: other data: that is told by its fingerprint.
MAY_CHANGE = LENGTH | {
    "training.target",
    "training.checkpoint_every",
    "training.checkpoint_seconds",
    "training.keep_checkpoints",
    "training.log_every",
    "data.root",
    "parallel.sequence",
    "parallel.shard",
    "parallel.patience",
}


def changes(before: ExperimentConfig, now: ExperimentConfig) -> dict[str, str]:
    """Return the fields that differ, with a sentence on each."""
    old, new = flatten(before.model_dump(mode="json")), flatten(now.model_dump(mode="json"))
    return {
        key: f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in old | new if old.get(key) != new.get(key)
    }


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects, with dots in the names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
