"""`klformer analyze mse`: Theorem 3 and Lemma S.2 by simulation, as printed and as corrected (docs/theorem3.md)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from klformer.analysis.mse import measure as mse
from klformer.analysis.output import print_table, write_results
from klformer.checks import check_count
from klformer.plotting import COLOURS, MARKERS

Row = dict[str, Any]

QUICK_GRID = mse.Grid(scales=(0.25, 0.5, 1.0), differences=(0.5, 1.0, 2.0), totals=(0.5, 1.0), num_samples=(4, 16))
LEMMA_DIMS = (2, 4, 8)
LEMMA_DIFFERENCES = (0.25, 0.5, 1.0, 1.5, 2.0)
#: The coordinates of a problem as columns of the results.
COLUMNS = {"scale": "scale", "difference": "|q-k|", "total": "|q+k|", "num_samples": "m"}
#: Where the lines of the figure cross.
BASE = mse.Point(scale=0.5, difference=1.0, total=1.0, num_samples=16)


@dataclass(frozen=True)
class MseAnalysis:
    """Theorem 3: how far estimates of a kernel are from it, as printed, as corrected and as simulated; Lemma S.2 too.

    Example: klformer analyze mse --out analysis
    """

    draws: int = 20_000
    """Estimates of the kernel at every point of the grid; for Lemma S.2 ten times as many features."""
    seed: int = 0
    """Seed of the noise."""
    quick: bool = False
    """A smaller grid."""
    out: Path = Path("analysis")
    """Folder for mse.* and lemma-s2.* (json, csv, svg, png)."""

    def __post_init__(self) -> None:
        check_count("draws", self.draws, 2)


@torch.no_grad()
def run(options: MseAnalysis) -> None:
    """Simulate, print a summary and write both sets of results."""
    console = Console()
    generator = torch.Generator().manual_seed(options.seed)
    grid = QUICK_GRID if options.quick else mse.Grid()
    rows = simulate_theorem(grid, options.draws, generator, console)
    lemma = simulate_lemma(10 * options.draws, generator)
    print_table(console, compare_formulas(rows), f"Theorem 3: the formulas, {options.draws:,} estimates a case")
    print_table(console, check_claims(rows), "Theorem 3: the claims")
    print_table(
        console,
        fall_with_eigenvalues(rows),
        f"Theorem 3: |q-k| = {BASE.difference:g}, |q+k| = {BASE.total:g}, m = {BASE.num_samples}",
    )
    print_table(
        console,
        [row for row in lemma if row["dim"] == 4],
        f"Lemma S.2: phi(x).phi(y) with {10 * options.draws:,} features, |x+y| = 1",
    )
    settings = {"draws": options.draws, "seed": options.seed, "quick": options.quick, "grid": asdict(grid)}
    written = write_results(
        options.out,
        "mse",
        caption="Theorem 3. Mean squared error of one estimate of the kernel: formulas (lines) and simulation "
        f"(markers, {options.draws:,} estimates each, bars of two standard errors, most of them smaller than the "
        "marker; PRF up to |Sᵀo| = 1). Where nothing else is said: scale 1/2 (mean eigenvalue 1/4), "
        "|q-k| = |q+k| = 1, m = 16.",
        rows=rows,
        settings=settings,
        figure=draw_theorem(rows, grid),
    )
    written += write_results(
        options.out,
        "lemma-s2",
        caption=f"Lemma S.2. Estimated kernel with {10 * options.draws:,} features, |x+y| = 1, against "
        "exp(-|x-y|²/2); bars of two standard errors. Lines: the expectation of each map, solid for the corrected, "
        "dashed for the printed.",
        rows=lemma,
        settings=settings,
        figure=draw_lemma(lemma),
    )
    console.print(f"written: {', '.join(str(path) for path in written)}", highlight=False, soft_wrap=True)


def simulate_theorem(grid: mse.Grid, draws: int, generator: torch.Generator, console: Console) -> list[Row]:
    """One row a map and point of the grid, except where PRF is too wild to be simulated."""
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Theorem 3", total=len(grid))
        for point in grid.points():
            problem = grid.problem(point)
            simulated = mse.simulate(problem, draws=draws, generator=generator)
            for name, result in simulated.items():
                if not mse.is_tame(problem, name):
                    continue
                printed, corrected = mse.PRINTED[name](problem), mse.CORRECTED[name](problem)
                rows.append(
                    {
                        "map": name,
                        **{COLUMNS[field]: value for field, value in point._asdict().items()},
                        "printed": printed,
                        "corrected": corrected,
                        "simulated": result.mse,
                        "standard error": result.mse_error,
                        "printed off by": mse.standard_errors(printed, result.mse, result.mse_error),
                        "corrected off by": mse.standard_errors(corrected, result.mse, result.mse_error),
                        "kernel": mse.KERNELS[name](problem),
                        "bias": result.bias,
                        "bias error": result.bias_error,
                    }
                )
            progress.advance(task)
    return rows


def simulate_lemma(draws: int, generator: torch.Generator) -> list[Row]:
    """One row a map, as printed or corrected, dimension and distance."""
    rows: list[Row] = []
    for dim in LEMMA_DIMS:
        for difference in LEMMA_DIFFERENCES:
            point = mse.Grid(dim=dim).problem(mse.Point(1.0, difference, 1.0, 1))
            kernel = mse.lemma_s2_kernel(point.q, point.k)
            averages = mse.simulate_lemma_s2(point.q, point.k, draws=draws, generator=generator)
            for name, average in averages.items():
                feature_map, _, form = name.partition("_")
                rows.append(
                    {
                        "map": feature_map,
                        "form": form or "corrected",
                        "dim": dim,
                        "|x-y|": difference,
                        "kernel": kernel,
                        "estimate": average.value,
                        "standard error": average.error,
                        "off by": mse.standard_errors(kernel, average.value, average.error),
                    }
                )
    return rows


def compare_formulas(rows: Sequence[Row]) -> list[Row]:
    """How far each formula is from the simulation over the whole grid."""
    table: list[Row] = []
    for name in mse.KERNELS:
        own = [row for row in rows if row["map"] == name]
        for form in ("printed", "corrected"):
            off = [abs(row[f"{form} off by"]) for row in own]
            ratios = [row[form] / row["simulated"] for row in own]
            table.append(
                {
                    "map": name,
                    "formula": form,
                    "cases": len(own),
                    "within 2 s.e.": f"{100 * sum(value < 2 for value in off) / len(off):.1f}%",
                    "furthest off, s.e.": max(off),
                    "formula / simulated": f"{min(ratios):.3g} to {max(ratios):.3g}",
                }
            )
    return table


def check_claims(rows: Sequence[Row]) -> list[Row]:
    """What the paper says of the errors, counted over the simulations."""
    table: list[Row] = []
    for name in mse.KERNELS:
        own = [row for row in rows if row["map"] == name]
        biases = [abs(mse.standard_errors(0.0, row["bias"], row["bias error"])) for row in own]
        table.append(
            {
                "map": name,
                "falls with the eigenvalues": _falls(own),
                "largest m x error": max(row["m"] * row["simulated"] for row in own),
                "above 2/m": f"{sum(row['simulated'] > mse.rks_bound_printed(row['m']) for row in own)} of {len(own)}",
                "largest bias, s.e.": max(biases),
            }
        )
    return table


def _falls(rows: Sequence[Row]) -> str:
    """In how many pairs of neighbouring scales, all else equal, the smaller one has the smaller simulated error."""
    lines: dict[tuple[Any, ...], list[float]] = {}
    for row in sorted(rows, key=lambda row: row["scale"]):
        lines.setdefault((row["|q-k|"], row["|q+k|"], row["m"]), []).append(row["simulated"])
    pairs = [low < high for line in lines.values() for low, high in pairwise(line)]
    return f"{sum(pairs)} of {len(pairs)}"


def fall_with_eigenvalues(rows: Sequence[Row]) -> list[Row]:
    """The error along the scales of one line of the grid; power is d log(simulated) / d log(eigenvalue)."""
    table: list[Row] = []
    for name in mse.KERNELS:
        line = _line(rows, name, BASE, "scale")
        for index, row in enumerate(line):
            power = "" if index == 0 else f"{_power(line[index - 1], row):.2f}"
            columns = ("printed", "corrected", "simulated", "standard error")
            table.append(
                {"map": name, "eigenvalue": row["scale"] ** 2, **{key: row[key] for key in columns}, "power": power}
            )
    return table


def _line(rows: Sequence[Row], name: str, base: mse.Point, field: str) -> list[Row]:
    """The rows of one map where all but one coordinate are those of `base`."""
    fixed = {COLUMNS[other]: value for other, value in base._asdict().items() if other != field}
    return [row for row in rows if row["map"] == name and all(row[key] == value for key, value in fixed.items())]


def _power(low: Row, high: Row) -> float:
    return math.log(high["simulated"] / low["simulated"]) / (2 * math.log(high["scale"] / low["scale"]))


@dataclass(frozen=True)
class _Panel:
    """One line through the grid: the coordinate that varies, from where to where, and how it is drawn."""

    field: str
    ends: tuple[float, float]
    limits: tuple[float, float]
    label: str
    title: str
    base: mse.Point = BASE

    def points(self) -> list[mse.Point]:
        low, high = self.ends
        values: Iterable[Any] = (low * (high / low) ** (step / 100) for step in range(101))
        if self.field == "num_samples":
            values = range(int(low), int(high) + 1)
        return [self.base._replace(**{self.field: value}) for value in values]

    def position(self, value: float) -> float:
        return value**2 if self.field == "scale" else value


PANELS = (
    _Panel("scale", (0.1, 3.0), (2e-6, 2.0), "mean eigenvalue of the covariance", "(a) eigenvalues"),
    _Panel("difference", (0.2, 5.0), (2e-6, 2.0), "|q - k|", "(b) difference"),
    _Panel("total", (0.2, 2.5), (5e-4, 5.0), "|q + k|", "(c) sum, at scale 1", BASE._replace(scale=1.0)),
    _Panel("num_samples", (3, 90), (1e-4, 1.0), "noise vectors m", "(d) number of samples"),
)


def draw_theorem(rows: Sequence[Row], grid: mse.Grid) -> Figure:
    """The error against the eigenvalues, |q - k|, |q + k| and m."""
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 8.4), layout="constrained")
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        _draw_panel(axis, panel, rows, grid)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean squared error")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8.5, frameon=False)
    return figure


def _draw_panel(axis: Axes, panel: _Panel, rows: Sequence[Row], grid: mse.Grid) -> None:
    points = panel.points()
    problems = [grid.problem(point) for point in points]
    x = [panel.position(getattr(point, panel.field)) for point in points]
    for number, name in enumerate(mse.KERNELS):
        _draw_map(axis, number, name, x, problems)
        simulated = _line(rows, name, panel.base, panel.field)
        axis.errorbar(
            [panel.position(row[COLUMNS[panel.field]]) for row in simulated],
            [row["simulated"] for row in simulated],
            yerr=[2 * row["standard error"] for row in simulated],
            linestyle="none",
            marker=MARKERS[number],
            markersize=6,
            markerfacecolor="white",
            markeredgewidth=1.4,
            capsize=3,
            color=COLOURS[number],
            zorder=3,
            label=f"{name.upper()}, simulated",
        )
    for bound, colour, label in (
        (mse.rks_bound_printed, "black", "bound of RKS, printed: 2/m"),
        (mse.rks_bound, "0.5", "bound of RKS, normalised: 1/(2m)"),
    ):
        bounds = [bound(point.num_samples) for point in points]
        axis.plot(x, bounds, color=colour, linestyle="-.", linewidth=1, label=label)
    axis.set(xscale="log", yscale="log", xlabel=panel.label, title=panel.title, ylim=panel.limits)
    # The grid's own values, as plain numbers.
    values = {"scale": grid.scales, "difference": grid.differences, "total": grid.totals}
    ticks = [panel.position(value) for value in values.get(panel.field, grid.num_samples)]
    axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.25)


def _draw_map(axis: Axes, number: int, name: mse.FeatureMap, x: list[float], problems: list[mse.Problem]) -> None:
    for form, formula, style in (("corrected", mse.CORRECTED, "-"), ("printed", mse.PRINTED, "--")):
        axis.plot(
            x,
            [formula[name](problem) for problem in problems],
            color=COLOURS[number],
            linestyle=style,
            linewidth=1.5,
            label=f"{name.upper()}, {form}",
        )


def draw_lemma(rows: Sequence[Row]) -> Figure:
    """Estimated kernels against the distance, RKS and PRF side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.8), layout="constrained")
    printed = {"rks": mse.lemma_s2_rks_printed, "prf": mse.lemma_s2_prf_printed}
    distances = [2.2 * step / 100 for step in range(1, 101)]
    for axis, (name, expectation) in zip(axes, printed.items(), strict=True):
        axis.plot(distances, [math.exp(-(d**2) / 2) for d in distances], color="black", label="exp(-|x-y|²/2)")
        for number, dim in enumerate(LEMMA_DIMS):
            style: dict[str, Any] = {"color": COLOURS[number], "linewidth": 1.2}
            points = [mse.Grid(dim=dim).problem(mse.Point(1.0, distance, 1.0, 1)) for distance in distances]
            axis.plot(distances, [expectation(point.q, point.k) for point in points], linestyle="--", **style)
            for form in ("corrected", "printed"):
                own = [row for row in rows if (row["map"], row["form"], row["dim"]) == (name, form, dim)]
                axis.errorbar(
                    [row["|x-y|"] for row in own],
                    [row["estimate"] for row in own],
                    yerr=[2 * row["standard error"] for row in own],
                    linestyle="none",
                    marker=MARKERS[number],
                    markersize=10 - 3 * number,
                    markerfacecolor="white" if form == "corrected" else COLOURS[number],
                    capsize=2,
                    label=f"{form}, D = {dim}",
                    **style,
                )
        axis.set(yscale="log", xlabel="|x - y|", title=name.upper())
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("estimated kernel")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8.5, frameon=False)
    return figure
