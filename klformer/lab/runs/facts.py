"""What a result took, for tables in which one row is one run."""

from collections.abc import Mapping
from typing import Any

_ENVIRONMENT = ("date", "processor", "threads", "torch", "klformer")


def what_it_took(result: Mapping[str, Any]) -> dict[str, Any]:
    """Steps, tokens and seconds of training, and when, where and with which versions, from a run's result.json.

    Older runs do not know the seconds of processors; theirs are None."""
    processor = result.get("train_processor_seconds")
    return {
        "steps": result["steps"],
        "best_step": result["best_step"],
        "train_tokens": result["train_tokens"],
        "train_seconds": round(result["train_seconds"], 1),
        "train_processor_seconds": None if processor is None else round(processor, 1),
        **{name: result["environment"][name] for name in _ENVIRONMENT},
    }
