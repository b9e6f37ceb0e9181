"""The record of a run: one JSON object a line, and TensorBoard events.

After a crash, lines beyond the checkpoint that the run goes on from are dropped, so that every step is there once.
Events are written in the calling thread: torch's own writer uses another one, whose errors can't be caught.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from klformer.errors import RunError
from klformer.files import check_regular, parse_json, write_text, writing


class MetricsLog:
    """Appends to the record of a run."""

    def __init__(self, path: Path, events: Path, *, step: int) -> None:
        self._path = path
        kept = "".join(json.dumps(line) + "\n" for line in read_lines(self._path) if line["step"] <= step)
        write_text(self._path, kept)
        self._events = _Events(events, step)
        with writing(self._path):
            self._file = self._path.open("a")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line of `kind` ("train" or "validation") for a step."""
        with writing(self._path):
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        scalars = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._events.write(step, scalars)

    def close(self) -> None:
        try:
            with writing(self._path):
                self._file.close()
        finally:
            self._events.close()


class _Events:
    """One file of TensorBoard events, which replace those of earlier files after `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        # Two files of one process in one second would have one name without the nanoseconds.
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{time.monotonic_ns()}.{os.getpid()}"
        with writing(self._path):
            folder.mkdir(exist_ok=True)
            self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(step=step, summary=Summary(value=values))

    def close(self) -> None:
        with writing(self._path):
            self._file.close()

    def _add(self, **fields: Any) -> None:
        with writing(self._path):
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._records.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, none if there is no such file; a last line that a crash cut off is left out."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(check_regular(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not (isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record):
            raise RunError(f"{path}, line {number} is damaged; remove the line to go on without it")
        found.append(record)
    return found
