"""Draws figures of README and docs into docs/figures: `python docs/draw.py`, or with names of some.

Numbers come from files that commands wrote, in evidence/data and beside the code: `klformer analyze` and
`klformer bench attention`. The other figures of pages come from `klformer analyze`, `klformer bench` and
`klformer report`, as those pages say.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import klformer
from klformer.analysis.eigenvalues.command import draw_summary
from klformer.analysis.evidence import chart, measure
from klformer.analysis.gradients import command as gradients_command
from klformer.analysis.pretraining import command as pretraining_command
from klformer.analysis.variance.command import correlate, draw_bars, draw_correlations
from klformer.plotting import COLOURS, FIXED, FROZEN, LEARNED, TRUTH, WIDE, plot_against_length, save

FIGURES = Path(__file__).parent / "figures"
EVIDENCE = Path(measure.__file__).with_name("measured.json")
#: Made by `klformer bench attention`; the page on efficiency has the command.
TIMES = FIGURES / "data" / "attention.json"
DATA = Path(__file__).parent / "evidence" / "data"
LRA = ("listops", "text", "retrieval", "image")
KERNELS = tuple(f"{name}-{map_}" for map_ in ("rks", "prf") for name in ("gmm", "fastfood", "generative"))
COMPARED = {*KERNELS, *(f"{name}:frozen=true" for name in KERNELS), "softmax", "linear-elu", "performer"}
RECALL = "recall-laptop: accuracy, %"
INK, GREEN = "#22272e", COLOURS[2]


def _recalled() -> list[dict[str, Any]]:
    """What was measured on recall."""
    return [row for row in json.loads(EVIDENCE.read_text())["rows"] if row["setting"] == RECALL]


def _rows(*names: str) -> list[dict[str, Any]]:
    """What files of data have, one after the other."""
    return [row for name in names for row in json.loads((DATA / f"{name}.json").read_text())["rows"]]


def _compared(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs of learned kernels beside their frozen selves."""
    numbers = (measure.measured(row, row["setting"], row["value"]) for row in rows)
    return [comparison.as_row() for comparison in measure.comparisons(numbers)]


def _summed() -> list[dict[str, Any]]:
    """What was measured on sparsity 0.5."""
    return _compared(row for row in _rows("sparsity") if row["setting"].startswith("sparsity0.5"))


def lra() -> Figure:
    """Kernels learned and frozen on the tasks of Long Range Arena."""
    return chart.draw(_compared(row for row in _rows(*LRA) if row["attention"] in COMPARED))


def sparsity() -> Figure:
    """The same on the sparsity task."""
    return chart.draw(_summed())


def overview() -> Figure:
    """What learning a kernel does to accuracy, and what a kernel does to time."""
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(WIDE + 5, 3.8), layout="constrained", width_ratios=(1.2, 1.2, 1)
    )
    _learned_beside_frozen(left, _recalled(), "Recall of 16 pairs, three seeds")
    _learned_beside_frozen(middle, _summed(), "Sums of 64 positions, three seeds")
    measured = json.loads(TIMES.read_text())
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in measured["results"]:
        lines.setdefault(result["name"], []).append((result["length"], result["seconds"]["median"]))
    plot_against_length(right, lines)
    colours = {"softmax": TRUTH, "performer": FIXED, "gmm-rks": GREEN, "generative-prf": LEARNED}
    for line in right.lines:
        line.set_color(colours[str(line.get_label())])
    right.set_ylabel("seconds")
    right.set_title("Forward and backward, one core")
    right.legend()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4, handlelength=1)
    return figure


def _learned_beside_frozen(axes: Axes, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    by_name = {row["attention"]: row for row in rows if row["draw"] != "kept"}
    learned = [f"{name}-{map_}" for map_ in ("prf", "rks") for name in ("gmm", "fastfood", "generative")]
    names = ["performer", *learned, "softmax"]
    for place, name in enumerate(names):
        row = by_name[name]
        if name in learned:
            frozen, trained = row["frozen"], row["learned"]
            same = round(frozen) == round(trained)  # one number for both, in the middle
            _bar(axes, place - 0.2, frozen, FROZEN, label=(place, "center") if same else (place - 0.02, "right"))
            _bar(axes, place + 0.2, trained, LEARNED, label=None if same else (place + 0.02, "left"))
        else:
            colour = FIXED if name == "performer" else TRUTH
            _bar(axes, place, row["learned"], colour, width=0.5, label=(place, "center"))
    kinds = {"fixed": FIXED, "frozen at its start": FROZEN, "learned": LEARNED, "softmax": TRUTH}
    for kind, colour in kinds.items():
        axes.bar([0], [0], color=colour, label=kind)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_ylim(0, 112)
    axes.set_ylabel("accuracy, %")
    axes.set_title(title)


def _bar(
    axes: Axes, place: float, value: float, colour: str, *, width: float = 0.38, label: tuple[float, str] | None
) -> None:
    """A bar, and its value at a place and a side of it, if it has one."""
    axes.bar(place, value, width, color=colour)
    if label is not None:
        axes.text(label[0], value + 1.5, f"{value:.0f}", ha=label[1], fontsize=9)


def architecture() -> Figure:
    """One layer: where the kernel is, and what is learned."""
    figure, axes = plt.subplots(figsize=(WIDE + 1, 4.1), layout="constrained")
    axes.set(xlim=(0, 18), ylim=(0, 8.2))
    axes.axis("off")
    boxes = {
        "x": (0.2, 3.3, 1.9, 1.2, "tokens\n(B, L, model)", "white"),
        "proj": (2.9, 2.7, 2.0, 2.4, "projections\nq, k, v\n(B, H, L, D)", "#dbe9f4"),
        "noise": (2.9, 6.2, 2.0, 1.4, "noise,\nin a buffer", "#eeeeee"),
        "dist": (5.7, 6.2, 3.1, 1.4, "distribution\ngmm, fastfood,\ngenerative, atoms", "#fde9c8"),
        "omega": (9.6, 6.2, 2.5, 1.4, r"frequencies $\Omega$" + "\n(H, R, D)", "#d8efe5"),
        "map": (
            5.7,
            2.7,
            3.1,
            2.4,
            "feature map\nrks: cos, sin\nprf: exp\n" + r"of $q\Omega^T$, $k\Omega^T$",
            "#d8efe5",
        ),
        "env": (5.7, 0.3, 3.1, 1.4, "envelope, mask\nlog-weight of a key", "#eeeeee"),
        "state": (9.6, 3.3, 2.5, 1.8, "state, F x E\n" + r"$\sum_j\,\phi(k_j)\,v_j^T$", "#d8efe5"),
        "read": (12.9, 3.3, 2.5, 1.8, r"$\phi(q_i)$ reads it," + "\nthen divides", "#d8efe5"),
        "out": (16.0, 3.3, 1.9, 1.8, "output\n(B, L, model)", "white"),
    }
    for left, bottom, width, height, text, colour in boxes.values():
        axes.add_patch(
            FancyBboxPatch(
                (left, bottom),
                width,
                height,
                boxstyle="round,pad=0.02,rounding_size=0.15",
                facecolor=colour,
                edgecolor=INK,
            )
        )
        axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=9.5)
    across = [("x", "proj"), ("proj", "map"), ("map", "state"), ("state", "read"), ("read", "out")]
    across += [("noise", "dist"), ("dist", "omega")]
    for start, end in across:
        (a, b, w, h, *_), (c, d, _, e, *_) = boxes[start], boxes[end]
        _arrow(axes, (a + w, b + h / 2), (c, d + e / 2))
    _arrow(axes, (10.85, 6.2), (8.8, 4.9))
    _arrow(axes, (7.25, 1.7), (7.25, 2.7))
    axes.text(0.2, 7.3, "Learned: the blue\nand orange boxes.", fontsize=9.5, va="top")
    axes.text(
        12.6,
        7.4,
        "Nothing of the size L x L\nor L x R is ever held.\nThe state is all that\ndecoding needs.",
        fontsize=9.5,
        va="top",
    )
    return figure


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=INK, shrinkA=2, shrinkB=2))


@torch.no_grad()
def kernel() -> Figure:
    """Distributions of frequencies in the plane, and the kernels that are their Fourier transforms."""
    torch.manual_seed(0)
    ring = torch.linspace(0, 2 * torch.pi, 17)[:-1]
    spectra = {
        "one Gaussian": 1.2 * torch.randn(400, 2),
        "mixture, +mean and -mean": torch.cat(
            [s * torch.tensor([2.5, 0.0]) + 0.6 * torch.randn(200, 2) for s in (1, -1)]
        ),
        "atoms on a ring": 2.5 * torch.stack([ring.cos(), ring.sin()], -1),
    }
    figure, grid = plt.subplots(2, 3, figsize=(WIDE, 4.6), layout="constrained", height_ratios=(1.2, 1))
    distance = torch.linspace(-4, 4, 161)
    for column, (name, omega) in enumerate(spectra.items()):
        top, bottom = grid[:, column]
        top.scatter(omega[:, 0], omega[:, 1], s=8, color=LEARNED, alpha=0.6, linewidths=0)
        top.set(xlim=(-4.5, 4.5), ylim=(-4.5, 4.5), aspect="equal", xticks=[-4, 0, 4], yticks=[-4, 0, 4])
        top.set_title(name)
        for axis, colour, style in ((0, LEARNED, "-"), (1, FIXED, "--")):
            estimate = torch.cos(distance[:, None] * omega[:, axis]).mean(-1)
            bottom.plot(distance, estimate, style, color=colour, label=("across", "along")[axis])
        bottom.set(ylim=(-1.1, 1.1), xlabel="key - query")
        bottom.grid()
    grid[0, 0].set_ylabel("frequencies")
    grid[1, 0].set_ylabel("kernel (rks)")
    grid[1, 0].legend(["horizontally", "vertically"], loc="lower right", fontsize=8.5, handlelength=1.4)
    return figure


@torch.no_grad()
def noise() -> Figure:
    """Estimates of one kernel from few and from many frequencies, several draws of each."""
    figure, grid = plt.subplots(1, 3, figsize=(WIDE, 2.6), layout="constrained", sharey=True)
    distance = torch.linspace(-4, 4, 161)
    for axes, count in zip(grid, (8, 64, 512), strict=True):
        attention = klformer.build_attention("rbf-rks", num_heads=1, head_dim=1, num_frequencies=count, smoothing=0.0)
        for draw in range(8):
            klformer.resample(attention, torch.Generator().manual_seed(draw))
            estimate = attention.kernel.estimate(torch.zeros(1, 1, 1, 1), distance.view(1, 1, -1, 1))
            axes.plot(distance, estimate.flatten(), color=LEARNED, alpha=0.5, linewidth=1)
        axes.plot(distance, (-(distance**2) / 2).exp(), color=TRUTH, linewidth=2, linestyle="--")
        axes.set(title=f"R = {count}", xlabel="key - query")
        axes.grid()
    grid[0].set_ylabel("kernel")
    return figure


def masks() -> Figure:
    """Which keys a query sees: padding, causal, both."""
    figure, grid = plt.subplots(1, 3, figsize=(WIDE, 3.2), layout="constrained")
    length, kept = 8, torch.arange(8) < 6
    padding = kept.expand(length, -1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    panels = {"key_mask, 2 of padding": padding, "causal=True": causal, "both": padding & causal}
    for axes, (title, seen) in zip(grid, panels.items(), strict=True):
        axes.pcolormesh(
            seen.float().flip(0),
            cmap=plt.matplotlib.colors.ListedColormap(["#eeeeee", LEARNED]),
            edgecolors="white",
            vmin=0,
            vmax=1,
        )
        axes.set(title=title, xlabel="key", aspect="equal", xticks=[0.5, 7.5], xticklabels=["0", "7"])
        axes.set(yticks=[0.5, 7.5], yticklabels=["7", "0"])
    grid[0].set_ylabel("query")
    return figure


def attention() -> Figure:
    """Time of every attention against the length: kernels in colour, other attentions grey, all named at their ends."""
    lengths = ("ms, L=256", "512", "1,024", "2,048", "4,096", "8,192")
    tokens = [256 * 2**number for number in range(len(lengths))]
    looks = {"rks": (LEARNED, "Fourier features"), "prf": (GREEN, "positive features"), "softmax": (TRUTH, "softmax")}
    figure, axes = plt.subplots(figsize=(WIDE, 5.4), layout="constrained")
    ends: dict[str, tuple[float, str]] = {}
    for row in _rows("attentions"):
        if row["setting"] != "time":
            continue
        name = row[""].strip("`")
        kind = {"performer": "prf", "linear-elu": "elu"}.get(name, name.rpartition("-")[2])
        colour, label = looks.get(kind, (FIXED, "a fixed map") if kind == "elu" else ("#8a8f98", "other attentions"))
        times = [float(str(row[length]).replace(",", "")) for length in lengths]
        axes.plot(tokens, times, color=colour, label=label, linewidth=2.4 if kind == "softmax" else 1.4)
        ends[name] = (times[-1], colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{number:,}" for number in tokens])
    axes.set(xlabel="tokens L", ylabel="ms, forward and backward", xlim=(tokens[0], tokens[-1] * 2.6))
    axes.grid(alpha=0.3)
    lowest = 0.0
    for name, (time, colour) in sorted(ends.items(), key=lambda end: end[1][0]):
        lowest = max(lowest * 1.27, time)  # names do not touch
        axes.annotate(name, (tokens[-1], time), (tokens[-1] * 1.15, lowest), color=colour, va="center", fontsize=10)
        axes.plot([tokens[-1], tokens[-1] * 1.13], [time, lowest], color=colour, linewidth=0.5)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), loc="upper left")
    return figure


def variance() -> Figure:
    """The three measures of variance over draws, by attention and task."""
    return draw_bars(_rows("variance"))


def correlations() -> Figure:
    """These measures against each other."""
    return draw_correlations(_rows("variance"), correlate(_rows("variance")))


def eigenvalues() -> Figure:
    """Eigenvalues of the frequencies' covariance before training and after."""
    return draw_summary(_rows("eigenvalues"))


def gradients() -> Figure:
    """Learning curves at sparsities 0.1 and 0.9, and how much gradients vary on the way."""
    return gradients_command.draw(_rows("gradients"), _rows("curves"))


def pretraining() -> Figure:
    """Hidden tokens guessed against steps, by attention."""
    return pretraining_command.draw(_rows("pretraining"), _rows("pretraining-curves"))


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "overview": overview,
    "architecture": architecture,
    "concept-kernel": kernel,
    "concept-noise": noise,
    "concept-masks": masks,
    "attention": attention,
    "lra": lra,
    "sparsity": sparsity,
    "variance": variance,
    "variance-correlations": correlations,
    "eigenvalues": eigenvalues,
    "gradients": gradients,
    "pretraining": pretraining,
}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or DRAWINGS:
        save(DRAWINGS[wanted](), FIGURES / f"{wanted}.png")
        print(f"docs/figures/{wanted}.png")
