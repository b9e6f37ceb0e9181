"""The figures of `klformer --plugin research analyze mse`, and the lines through the grid that they show."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from klformer.lab.plotting import COLOURS, MARKERS, WIDE
from research.mse import lemma
from research.mse import measure as mse

Row = dict[str, Any]

#: The coordinates of a problem as columns of the results.
COLUMNS = {"scale": "scale", "difference": "|q-k|", "total": "|q+k|", "num_samples": "m"}
#: Where the lines of the figure cross.
BASE = mse.Point(scale=0.5, difference=1.0, total=1.0, num_samples=16)


def line_through(rows: Sequence[Row], name: str, base: mse.Point, field: str) -> list[Row]:
    """The rows of one map where all but one coordinate are those of `base`."""
    fixed = {COLUMNS[other]: value for other, value in base._asdict().items() if other != field}
    return [row for row in rows if row["map"] == name and all(row[key] == value for key, value in fixed.items())]


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
    figure, axes = plt.subplots(2, 2, figsize=(WIDE, 7.6), layout="constrained")
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        _draw_panel(axis, panel, rows, grid)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean squared error")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _draw_panel(axis: Axes, panel: _Panel, rows: Sequence[Row], grid: mse.Grid) -> None:
    points = panel.points()
    problems = [grid.problem(point) for point in points]
    x = [panel.position(getattr(point, panel.field)) for point in points]
    for number, name in enumerate(mse.KERNELS):
        _draw_map(axis, number, name, x, problems)
        simulated = line_through(rows, name, panel.base, panel.field)
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
    figure, axes = plt.subplots(1, 2, figsize=(WIDE, 4.4), layout="constrained")
    printed = {"rks": lemma.rks_printed, "prf": lemma.prf_printed}
    distances = [2.2 * step / 100 for step in range(1, 101)]
    for axis, (name, expectation) in zip(axes, printed.items(), strict=True):
        axis.plot(distances, [math.exp(-(d**2) / 2) for d in distances], color="black", label="exp(-|x-y|²/2)")
        for number, dim in enumerate(sorted({row["dim"] for row in rows})):
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
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure
