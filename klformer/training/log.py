"""The record of a run: metrics.jsonl, one JSON object a line, and TensorBoard events.

After a crash, lines beyond the checkpoint that the run goes on from are dropped, so that every step is there once.
"""

import json
import os
from pathlib import Path
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter


class MetricsLog:
    """Appends to the record of a run.

    Args:
        folder: The run's.
        step: The step that the run goes on from; later lines are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(self._path) if line["step"] <= step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, self._path)
        self._file = self._path.open("a")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """A line of `kind` ("train" or "validation") for a step."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a crash cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    whole = [line for line in lines[:-1] if line]
    return [json.loads(line) for line in whole]
