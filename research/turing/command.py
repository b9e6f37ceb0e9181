"""`analyze turing`: Theorems 1 and 2 by construction, and what is left of them with random features.

Every machine is run by both constructions of `research.turing`, beside a plain simulator: with hard
attention in float64 and in exact arithmetic, with soft attention, and with RKS and PRF features.
research/pages/turing.md explains them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from klformer.checks import check_count
from klformer.lab.analysis.output import AnalysisOptions, Count, print_table, write_csv, write_results
from klformer.lab.plotting import MARKERS, line_style
from klformer.lab.tasks.files import progress
from klformer.lab.terminal import make_console
from research.turing import (
    CONSTRUCTIONS,
    Configuration,
    ConstructionName,
    HardAttention,
    Survival,
    TuringMachine,
    TuringTransformer,
    best_survival,
    build,
    compare,
    decoded_trace,
    example_names,
    expected_trace,
    fewest_samples,
    first_tie,
    highest_temperature,
    load_machine,
    tape_of,
)

#: The machine of the figure, stopped after ever more steps.
SCALING_MACHINE = "counter"
SCALING_STEPS = (8, 16, 32, 64, 128, 256, 512)
QUICK_SCALING_STEPS = (8, 16, 32)
FEWEST_SAMPLES = 4
#: Steps of a trace that are shown; the file has all.
SHOWN_STEPS = 50
SEEDS = Count("seeds", full=10, quick=3)
MAX_SAMPLES = Count("max_samples", full=16_384, quick=1024, minimum=FEWEST_SAMPLES)


@dataclass(frozen=True, kw_only=True)
class TuringAnalysis(AnalysisOptions):
    """Run Turing machines as Transformers with explicit weights: hard, soft and random-feature attention.

    Example: klformer --plugin research analyze turing --machines increment beaver3
    """

    counts: ClassVar[tuple[Count[Any], ...]] = (SEEDS, MAX_SAMPLES)

    machines: tuple[str, ...] = ()
    """Examples by name, or files; all examples if none is given."""
    word: str | None = None
    """Input, if not the one in the file."""
    steps: int | None = None
    """Limit of steps, if not the one in the file."""
    seeds: int | None = None
    """Draws of random features, 10, or 3 with --quick; a number of samples counts if all of them follow the machine."""
    max_samples: int | None = None
    """The largest number of samples to try, 16384, or 1024 with --quick; the search starts with 4 and doubles them."""
    trace: bool = False
    """Show every step of the plain machine and of the decoder with hard attention side by side, and the final tape."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None:
            check_count("steps", self.steps)


@dataclass(frozen=True)
class _Search:
    """How hard to look for survival."""

    seeds: int
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, options: TuringAnalysis) -> "_Search":
        largest = options.choose(MAX_SAMPLES)
        numbers = [FEWEST_SAMPLES]
        while numbers[-1] * 2 <= largest:
            numbers.append(numbers[-1] * 2)
        return cls(options.choose(SEEDS), tuple(numbers))

    def run(
        self,
        model: TuringTransformer,
        word: str,
        steps: int,
        feature_map: Literal["rks", "prf"],
        temperature: float | None,
    ) -> Survival:
        """The better of two temperatures: the highest at which soft attention survives, and a quarter of it."""
        highest = 1.0 if temperature is None else temperature
        return best_survival(
            fewest_samples(
                model,
                word,
                steps,
                feature_map=feature_map,
                temperature=chosen,
                numbers=self.numbers,
                seeds=range(self.seeds),
            )
            for chosen in (highest, highest / 4)
        )

    def describe(self, found: Survival) -> int | str:
        return f"not up to {self.numbers[-1]}" if found.fewest is None else found.fewest


def run(options: TuringAnalysis) -> None:
    """Run all machines, print the table and write it with the figure."""
    machines = [load_machine(name) for name in options.machines or example_names()]
    for machine in machines:
        machine.check_word(machine.word if options.word is None else options.word)
    console = make_console(140)
    trace_path = _write_traces(machines, options, console)
    search = _Search.of(options)
    scaling_steps = QUICK_SCALING_STEPS if options.quick else SCALING_STEPS
    jobs = len(CONSTRUCTIONS) * (len(machines) * 3 + len(scaling_steps) * 2)
    rows: list[dict[str, Any]] = []
    scaling: list[dict[str, Any]] = []
    with progress("Turing machines", jobs, quiet=False) as advance:
        for machine in machines:
            word, steps = _problem(machine, options)
            rows += [_row(machine, construction, word, steps, search, advance) for construction in CONSTRUCTIONS]
        machine = load_machine(SCALING_MACHINE)
        for construction in CONSTRUCTIONS:
            scaling += [_scaling_row(machine, construction, steps, search, advance) for steps in scaling_steps]
    title = (
        f"Turing machines as Transformers; no: not up to m = {search.numbers[-1]:,}, (steps right in the worst seed)"
    )
    print_table(console, [brief(row) for row in rows], title)
    print_table(console, [brief_scaling(row) for row in scaling], f"{machine.name}, stopped after ever more steps")
    caption = (
        f"{machine.name}: the highest temperature at which soft attention follows it to the end, and the number of RKS "
        f"samples from which on {search.seeds} of {search.seeds} seeds do (crosses: not up to {search.numbers[-1]:,})."
    )
    settings = asdict(options) | {
        "seeds": search.seeds,
        "samples": search.numbers,
        "first_tie_in_float64": first_tie(),
    }
    written = write_results(
        options.out, "turing", caption=caption, rows=rows, settings=settings, figure=_figure(scaling, search)
    )
    written += write_results(options.out, "turing-scaling", caption=caption, rows=scaling, settings=settings)
    for path in (*written, trace_path):
        console.print(f"written to {path}", highlight=False)


def _problem(machine: TuringMachine, options: TuringAnalysis) -> tuple[str, int]:
    """Word and limit of steps: those of the command, else those of the file."""
    word = machine.word if options.word is None else options.word
    return word, machine.steps if options.steps is None else options.steps


def _write_traces(machines: Sequence[TuringMachine], options: TuringAnalysis, console: Console) -> Path:
    """Write the steps of all machines and both constructions; show them if that was asked for."""
    rows: list[dict[str, Any]] = []
    for machine in machines:
        word, steps = _problem(machine, options)
        for construction in CONSTRUCTIONS:
            mine, tapes = _trace(machine, construction, word, steps)
            rows += [{"machine": machine.name, "construction": construction} | row for row in mine]
            if options.trace:
                shown = mine[:SHOWN_STEPS]
                title = f"{machine.name}, {construction}: {len(shown)} of {len(mine)} steps, copying included"
                print_table(console, shown, title)
                for name, tape in tapes.items():
                    console.print(f"final tape, {name}: {tape or '(blank)'}", highlight=False, markup=False)
    path = options.out / "turing-trace.csv"
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(path, rows)
    return path


def _trace(
    machine: TuringMachine, construction: ConstructionName, word: str, steps: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for every output of the decoder beside what it should be, and both tapes at the end."""
    traces: dict[str, Sequence[Configuration | None]] = {
        "machine": expected_trace(machine, word, steps),
        "decoder": decoded_trace(build(machine, construction), word, steps, HardAttention()),
    }
    rows = []
    for step, (plain, decoded) in enumerate(zip(*traces.values(), strict=True)):
        row: dict[str, Any] = {"step": step}
        for field in ("state", "symbol", "head"):
            row[f"{field}, machine"] = getattr(plain, field)
            row[f"{field}, decoder"] = None if decoded is None else getattr(decoded, field)
        rows.append(row | {"agree": "yes" if plain == decoded else "no"})
    return rows, {name: tape_of(machine, word, trace) for name, trace in traces.items()}


def _row(
    machine: TuringMachine,
    construction: ConstructionName,
    word: str,
    steps: int,
    search: _Search,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    model = build(machine, construction)
    floating = compare(model, word, steps, HardAttention())
    exact = compare(model, word, steps, HardAttention(exact=True))
    temperature = highest_temperature(model, word, steps)
    advance(1)
    found = {}
    for feature_map in ("rks", "prf"):
        found[feature_map] = search.run(model, word, steps, feature_map, temperature)
        advance(1)
    heads = [configuration.head for configuration in expected_trace(machine, word, steps)]
    row: dict[str, Any] = {
        "machine": machine.name,
        "construction": construction,
        "copying": floating.copying,
        "steps": floating.steps,
        "cells": f"{min(heads)} to {max(heads)}",
        "hard, float64": _verdict(floating.first_wrong),
        "hard, exact": _verdict(exact.first_wrong),
        "soft up to T": "none" if temperature is None else temperature,
    }
    for feature_map, survival in found.items():
        row[f"{feature_map} from m"] = search.describe(survival)
        row[f"{feature_map} T"] = survival.temperature
        row[f"{feature_map} right steps"] = survival.right_steps
    return row


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row that fits on a screen."""
    total = row["copying"] + row["steps"]
    brief = {key: row[key] for key in ("machine", "construction", "copying", "steps", "cells", "hard, float64")}
    brief |= {"hard, exact": row["hard, exact"], "soft up to T": _power(row["soft up to T"])}
    for feature_map in ("rks", "prf"):
        fewest, temperature = row[f"{feature_map} from m"], _power(row[f"{feature_map} T"])
        failed = f"no ({row[f'{feature_map} right steps']} of {total})"
        brief[f"{feature_map} from m"] = failed if isinstance(fewest, str) else f"{fewest}, T = {temperature}"
    return brief


def brief_scaling(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the machine that is stopped after ever more steps, with its temperature as a power of two."""
    return dict(row) | {"soft up to T": _power(row["soft up to T"])}


def _power(temperature: float | str) -> str:
    return temperature if isinstance(temperature, str) else f"2^{math.log2(temperature):.3g}"


def _verdict(first_wrong: int | None) -> str:
    return "every step" if first_wrong is None else f"wrong at {first_wrong}"


def _scaling_row(
    machine: TuringMachine,
    construction: ConstructionName,
    steps: int,
    search: _Search,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    model = build(machine, construction)
    temperature = highest_temperature(model, machine.word, steps)
    advance(1)
    found = search.run(model, machine.word, steps, "rks", temperature)
    advance(1)
    return {
        "construction": construction,
        "steps": steps,
        "soft up to T": "none" if temperature is None else temperature,
        "rks from m": search.describe(found),
    }


def _figure(scaling: Sequence[dict[str, Any]], search: _Search) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for number, construction in enumerate(CONSTRUCTIONS):
        points = [row for row in scaling if row["construction"] == construction]
        style: dict[str, Any] = line_style(number)
        _draw(left, points, "soft up to T", construction, {**style, "marker": MARKERS[number]})
        _draw(right, points, "rks from m", construction, {**style, "marker": MARKERS[number]})
        failed = [row["steps"] for row in points if isinstance(row["rks from m"], str)]
        right.plot(failed, [search.numbers[-1]] * len(failed), "x", color=style["color"], label=None)
    left.set(ylabel="highest temperature T of soft attention")
    right.set(ylabel="RKS samples m needed")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("steps of the machine")
        axes.grid(alpha=0.3)
    left.legend()
    return figure


def _draw(axes: Axes, points: Sequence[dict[str, Any]], column: str, label: str, style: dict[str, Any]) -> None:
    numbers = [(row["steps"], row[column]) for row in points if not isinstance(row[column], str)]
    axes.plot([x for x, _ in numbers], [y for _, y in numbers], label=label, **style)
