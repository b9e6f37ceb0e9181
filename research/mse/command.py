"""`analyze mse`: Theorem 3 and Lemma S.2 by simulation, as printed and as corrected (research/pages/theorem3.md)."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from klformer.checks import check_count
from klformer.lab.analysis.output import print_table, write_results
from research.mse import lemma
from research.mse import measure as mse
from research.mse.figures import BASE, COLUMNS, Row, draw_lemma, draw_theorem, line_through

QUICK_GRID = mse.Grid(scales=(0.25, 0.5, 1.0), differences=(0.5, 1.0, 2.0), totals=(0.5, 1.0), num_samples=(4, 16))
LEMMA_DIMS = (2, 4, 8)
LEMMA_DIFFERENCES = (0.25, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class MseAnalysis:
    """Theorem 3: how far estimates of a kernel are from it, as printed, as corrected and as simulated; Lemma S.2 too.

    Example: klformer --plugin research analyze mse --out analysis
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
    lemma_rows = simulate_lemma(10 * options.draws, generator)
    print_table(console, compare_formulas(rows), f"Theorem 3: the formulas, {options.draws:,} estimates a case")
    print_table(console, check_claims(rows), "Theorem 3: the claims")
    print_table(
        console,
        fall_with_eigenvalues(rows),
        f"Theorem 3: |q-k| = {BASE.difference:g}, |q+k| = {BASE.total:g}, m = {BASE.num_samples}",
    )
    print_table(console, compare_maps(lemma_rows), "Lemma S.2: the maps")
    print_table(
        console,
        [row for row in lemma_rows if row["dim"] == 4],
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
        rows=lemma_rows,
        settings=settings,
        figure=draw_lemma(lemma_rows),
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
            kernel = lemma.kernel(point.q, point.k)
            averages = lemma.simulate(point.q, point.k, draws=draws, generator=generator)
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


def compare_maps(rows: Sequence[Row]) -> list[Row]:
    """How far the maps of Lemma S.2, as printed and as corrected, are from the kernel over all cases."""
    table: list[Row] = []
    for name, form in dict.fromkeys((row["map"], row["form"]) for row in rows):
        own = [row for row in rows if (row["map"], row["form"]) == (name, form)]
        off = [abs(row["off by"]) for row in own]
        ratios = [row["estimate"] / row["kernel"] for row in own]
        table.append(
            {
                "map": name,
                "form": form,
                "cases": len(own),
                "furthest off, s.e.": max(off),
                "estimate / kernel": f"{min(ratios):.3g} to {max(ratios):.3g}",
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
        line = line_through(rows, name, BASE, "scale")
        for index, row in enumerate(line):
            power = "" if index == 0 else f"{_power(line[index - 1], row):.2f}"
            columns = ("printed", "corrected", "simulated", "standard error")
            table.append(
                {"map": name, "eigenvalue": row["scale"] ** 2, **{key: row[key] for key in columns}, "power": power}
            )
    return table


def _power(low: Row, high: Row) -> float:
    return math.log(high["simulated"] / low["simulated"]) / (2 * math.log(high["scale"] / low["scale"]))
