"""The figures of `klformer analyze kernel`, drawn from the rows that it writes: what is kept of them is enough to draw
them again."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from klformer.lab.plotting import COLOURS, FROZEN, LEARNED, TRUTH, WIDE

Row = Mapping[str, Any]

INITIAL, TRAINED, GAUSSIAN, SOFTMAX = FROZEN, LEARNED, COLOURS[2], COLOURS[1]


def draw_profiles(rows: Sequence[Row]) -> Figure:
    """Draw the kernel of every head along the direction that counts, before and after training."""
    figure, all_axes = head_panels(_last(rows, "layer"), _last(rows, "head"))
    for (layer, head), of_head in _grouped(rows, "layer", "head").items():
        axes, delta = all_axes[layer - 1, head - 1], _column(of_head, "delta")
        for name, colour, style in (("initial", INITIAL, "--"), ("trained", TRAINED, "-")):
            mean, deviation = _column(of_head, name), _column(of_head, f"{name}_deviation")
            _draw_with_band(axes, delta, mean, deviation, colour, label=name, linestyle=style)
        axes.plot(delta, np.exp(-(delta**2) / 2), color=GAUSSIAN, linestyle=":", label="Gaussian")
        axes.plot(delta, np.exp(delta), color=SOFTMAX, linestyle="-.", linewidth=1, label="softmax")
        axes.set_ylim(-0.5, 2.5)
    all_axes[0, -1].legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    all_axes[-1, 0].set_xlabel("delta")
    return figure


def draw_attention(rows: Sequence[Row]) -> Figure:
    """Draw where the first token attends: a line of the picture is a head."""
    by_head = _grouped(rows, "layer", "head")
    weights = np.stack([_column(of_head, "weight") for of_head in by_head.values()])
    figure, axes = plt.subplots(figsize=(WIDE, 1.6 + 0.28 * len(weights)), layout="constrained")
    image = axes.imshow(weights * weights.shape[1], aspect="auto", cmap="cividis", interpolation="nearest")
    axes.set_yticks(range(len(weights)), [f"layer {layer} head {head}" for layer, head in by_head], fontsize=9)
    axes.set_xlabel("position (0 is CLS)")
    figure.colorbar(image, ax=axes, label="weight x number of positions")
    return figure


def draw_planted(rows: Sequence[Row], profiles: Sequence[Row]) -> Figure:
    """Draw the planted kernel beside the model's, before and after training."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for number, (row, colour) in enumerate(zip(rows, (INITIAL, TRAINED), strict=True)):
        of_kernel = [point for point in profiles if point["kernel"] == row["kernel"]]
        delta = _column(of_kernel, "delta")
        if number == 0:
            axes.plot(delta, _column(of_kernel, "planted"), color=TRUTH, linewidth=2, label="planted")
        label = f"{row['kernel']}, error {row['error_of_mean']:.2g}"
        mean, deviation = _column(of_kernel, "mean"), _column(of_kernel, "deviation")
        _draw_with_band(axes, delta, mean, deviation, colour, label=label, linestyle="--")
    axes.set_xlabel("key - query, along the first axis")
    axes.grid()
    axes.legend()
    return figure


def draw_learning(rows: Sequence[Row], profiles: Sequence[Row]) -> Figure:
    """Draw the kernel at the start and at moments of the training, a panel each, over the planted one in gray."""
    columns = min(3, len(rows))
    lines = math.ceil(len(rows) / columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(WIDE, 0.7 + 1.9 * lines), layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for axes, row in zip(grid.flat, rows, strict=False):
        step = row["step"]
        of_step = [point for point in profiles if point["step"] == step]
        delta = _column(of_step, "delta")
        axes.plot(delta, _column(of_step, "planted"), color="#999999", linewidth=4, solid_capstyle="butt")
        mean, deviation = _column(of_step, "mean"), _column(of_step, "deviation")
        _draw_with_band(axes, delta, mean, deviation, TRAINED if step else INITIAL)
        axes.set_title(f"{f'step {step:,}' if step else 'before'}: error {row['error_of_mean']:.2g}")
        axes.grid()
    for axes in grid.flat[len(rows) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("key - query")
    for axes in grid[:, 0]:
        axes.set_ylabel("kernel")
    return figure


def head_panels(layers: int, heads: int, *, square: bool = False) -> tuple[Figure, Any]:
    """Make a panel for every head, layers from top to bottom."""
    figure, all_axes = plt.subplots(
        layers, heads, figsize=(1.65 * heads + 1.2, 1.7 * layers + 0.8), layout="constrained", squeeze=False,
        sharex=not square, sharey=not square,
    )  # fmt: skip
    for layer in range(layers):
        for head in range(heads):
            all_axes[layer, head].set_title(f"layer {layer + 1}, head {head + 1}", fontsize=9)
            all_axes[layer, head].tick_params(labelsize=9)
            all_axes[layer, head].grid(alpha=0.3)
    return figure, all_axes


def _draw_with_band(axes: Axes, x: Any, mean: Any, deviation: Any, colour: str, **line: Any) -> None:
    """Draw a mean over draws, and the deviation of one draw around it."""
    axes.plot(x, mean, color=colour, **line)
    axes.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)


def _grouped(rows: Iterable[Row], *fields: str) -> dict[tuple[int, ...], list[Row]]:
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return groups


def _column(rows: Iterable[Row], field: str) -> Any:
    return np.array([row[field] for row in rows])


def _last(rows: Iterable[Row], field: str) -> int:
    return max(int(row[field]) for row in rows)
