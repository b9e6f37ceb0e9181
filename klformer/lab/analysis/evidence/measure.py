"""Learned against frozen: runs that differ in nothing else, seed by seed.

A pair is a learned run and a frozen one of the same task, preset, seed and options. The difference of a pair is free of
what the seed does to both; the standard error is that of the mean of these differences.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from klformer.attention import AttentionSpec, attention_options
from klformer.errors import ArgumentError
from klformer.lab.analysis.seeds import standard_error

Draw = Literal["redrawn", "kept", "none"]


@dataclass(frozen=True)
class Measured:
    """One number of one run."""

    setting: str
    attention: str
    frozen: bool
    draw: Draw
    seed: int
    value: float
    #: Where it is from, for messages.
    run: str = "?"


@dataclass(frozen=True)
class Comparison:
    """All seeds of an attention in one setting, learned and frozen."""

    setting: str
    attention: str
    draw: Draw
    learned: Sequence[float]
    frozen: Sequence[float]
    differences: Sequence[float]

    def as_row(self) -> dict[str, Any]:
        """Return means and deviations, and the paired difference with its standard error; None where there is none."""
        return {
            "setting": self.setting,
            "attention": self.attention,
            "draw": self.draw,
            "seeds": max(len(self.learned), len(self.frozen)),
            "learned_seeds": len(self.learned),
            "frozen_seeds": len(self.frozen),
            "learned": _mean(self.learned),
            "learned_std": _deviation(self.learned),
            "frozen": _mean(self.frozen),
            "frozen_std": _deviation(self.frozen),
            "difference": _mean(self.differences),
            "standard_error": standard_error(self.differences),
            "pairs": len(self.differences),
        }


def error_of(row: Mapping[str, Any], kind: Literal["learned", "frozen"]) -> float | None:
    """Return the standard error of the mean of a comparison's learned or frozen runs; None of fewer than two. Rows of
    measured.json have one number of seeds for both."""
    deviation = row[f"{kind}_std"]
    return None if deviation is None else float(deviation / math.sqrt(row.get(f"{kind}_seeds", row["seeds"])))


def measured(result: Mapping[str, Any], setting: str, value: float, *, run: str = "?") -> Measured:
    """Return a number of a run, from its result.json; `run` names the run in messages."""
    spec = AttentionSpec.parse(result["attention"])
    options = attention_options(spec.name)
    draw: Draw = "none"
    if "num_frequencies" in options and "redraw" in options:
        draw = "redrawn" if spec.options.get("redraw", True) else "kept"
    rest = {key: option for key, option in spec.options.items() if key not in ("frozen", "redraw")}
    return Measured(
        setting=setting,
        attention=AttentionSpec(name=spec.name, options=rest).label(),
        frozen=bool(spec.options.get("frozen", False)),
        draw=draw,
        seed=int(result["seed"]),
        value=value,
        run=run,
    )


def comparisons(numbers: Iterable[Measured]) -> list[Comparison]:
    """Return a comparison for every setting, attention and way of drawing, in the order in which they come."""
    groups: dict[tuple[str, str, Draw], dict[bool, dict[int, Measured]]] = {}
    for number in numbers:
        by_kind = groups.setdefault((number.setting, number.attention, number.draw), {False: {}, True: {}})
        first = by_kind[number.frozen].setdefault(number.seed, number)
        if first is not number:
            raise ArgumentError(
                f"runs {first.run} and {number.run} can't be told apart: both are {number.attention}"
                f"{', frozen,' if number.frozen else ''} of seed {number.seed} in {number.setting}; give one of them"
            )
    return [
        Comparison(
            setting,
            attention,
            draw,
            learned=[number.value for number in by_kind[False].values()],
            frozen=[number.value for number in by_kind[True].values()],
            differences=[
                by_kind[False][seed].value - by_kind[True][seed].value
                for seed in sorted(by_kind[False])
                if seed in by_kind[True]
            ],
        )
        for (setting, attention, draw), by_kind in groups.items()
    ]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
