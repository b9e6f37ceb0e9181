"""Files that `klformer bench` wrote, checked: who reads them may rely on rows that have names and lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from klformer.errors import ArgumentError
from klformer.files import read_json
from klformer.lab.tables import finite

Row = Mapping[str, Any]
Kind = Literal["attention", "model", "peers"]
#: Lists of rows in the file of each benchmark, with the fields that a row must have, and those that are objects.
_LISTS: Mapping[Kind, Mapping[str, tuple[Sequence[str], Sequence[str]]]] = {
    "attention": {"results": (("name", "length"), ("seconds", "processor", "seconds_kept"))},
    "model": dict.fromkeys(
        ("speed", "length"),
        (("task", "attention", "length"), ("steps_per_second", "processor", "relative", "relative_processor")),
    ),
    "peers": {
        "comparisons": (("peer", "klformer", "length"), ("errors", "time_ratio", "time_ratio_kept", "memory_ratio")),
        "subjects": (("name", "length"), ("seconds", "processor", "seconds_kept", "memory")),
    },
}


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark wrote."""

    kind: Kind
    content: Mapping[str, Any]

    def rows(self, name: str) -> Sequence[Row]:
        """Return one of its lists of rows."""
        rows: Sequence[Row] = self.content[name]
        return rows

    def about(self) -> str:
        """Say where and when it was measured."""
        environment = self.content.get("environment") or {}
        parts = (environment.get("device", environment.get("machine")), environment.get("date"))
        return ", ".join(str(part) for part in parts if part) or "machine and date unknown"


def read_benchmark(path: Path) -> Benchmark:
    """Read a file of any of the benchmarks; what it is, its content says."""
    content = read_json(path)
    kind = next((kind for kind, lists in _LISTS.items() if next(iter(lists)) in content), None)
    if kind is None:
        known = ", ".join(next(iter(lists)) for lists in _LISTS.values())
        raise ArgumentError(f"{path} is not a benchmark of attentions, models or peers: it has none of {known}")
    _check_objects(content, ("environment", "options", "sizes"), path)
    for name, (needed, objects) in _LISTS[kind].items():
        for row in rows_of(content, name, needed, path):
            length = finite(row["length"])
            if length is None or length <= 0:
                raise ArgumentError(
                    f"{path} is not a benchmark: length must be a positive number, got {row['length']!r}"
                )
            _check_objects(row, objects, path)
    return Benchmark(kind, content)


def rows_of(content: Mapping[str, Any], key: str, needed: Sequence[str], path: Path) -> tuple[Row, ...]:
    """Return a list of objects, each with the fields that are needed."""
    rows = content.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ArgumentError(f"{path} has no list of {key}")
    for row in rows:
        if missing := [name for name in needed if name not in row]:
            raise ArgumentError(f"{path}: a row of {key} has no {missing[0]!r}: {row}")
    return tuple(rows)


def _check_objects(content: Mapping[str, Any], keys: Sequence[str], path: Path) -> None:
    for key in keys:
        if not isinstance(content.get(key) or {}, dict):
            raise ArgumentError(f"{path} is not a benchmark: {key} must be an object, got {content[key]!r}")
