"""Draw the figures of README, docs and research pages: `python -m research.draw`, or with names of some.

Numbers come from files that commands wrote, in research/data and beside the code: `klformer analyze` and
`klformer bench`. The only other pictures of pages are those of the report in a browser.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, cast

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import klformer
from klformer.attention.kernelized import KernelizedAttention
from klformer.lab.analysis import recommend
from klformer.lab.analysis.cells import values_by_attention
from klformer.lab.analysis.eigenvalues import draw_summary
from klformer.lab.analysis.evidence import chart, measure
from klformer.lab.analysis.kernel import figures as kernel_figures
from klformer.lab.analysis.variance.command import correlate, draw_correlations, draw_dots
from klformer.lab.bench.attention import lengths_of, names_of, values_of
from klformer.lab.plotting import COLOURS, FIXED, FROZEN, LEARNED, STYLES, TRUTH, WIDE, plot_against_length, save
from klformer.lab.report import paper_numbers
from research.gradients import command as gradients_command
from research.mse import figures as mse_figures
from research.mse import measure as mse_measure
from research.pretraining import command as pretraining_command

ROOT = Path(__file__).parents[1]
EVIDENCE = Path(recommend.__file__).with_name("measured.json")
DATA = Path(__file__).parent / "data"
CONVERTED = ROOT / "examples/conversion/measured.json"
RIGHT = "masked tokens right, %"
LRA = ("listops", "text", "retrieval", "image")
KERNELS = tuple(f"{name}-{map_}" for map_ in ("rks", "prf") for name in ("gmm", "fastfood", "generative"))
COMPARED = {*KERNELS, *(f"{name}:frozen=true" for name in KERNELS), "softmax", "linear-elu", "performer"}
RECALL = "recall-laptop: accuracy, %"
INK, GREEN = "#22272e", COLOURS[2]


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


def lengths() -> Figure:
    """Validation accuracy on Text of 4,000 bytes against minutes of a processor, also of runs that did not end."""
    figure, axes = plt.subplots(figsize=(WIDE, 4.2), layout="constrained")
    runs = [row for row in _rows("lengths") if row["setting"].startswith("text-workstation") and row["seed"] == 0]
    for run, colour in zip(runs, COLOURS, strict=False):
        curve = [
            row
            for row in _of("lengths-curves", run["setting"])
            if (row["attention"], row["seed"]) == (run["attention"], run["seed"])
        ]
        minutes = [row["step"] * run["train_processor_seconds"] / run["steps"] / 60 for row in curve]
        axes.plot(minutes, [row["value"] for row in curve], "o-", color=colour, label=run["attention"])
    axes.set(xlabel="minutes of a processor", ylabel="accuracy on validation, %", xlim=(0, None))
    axes.legend()
    return figure


def sparsity() -> Figure:
    """The same on the sparsity task."""
    return chart.draw(_summed())


def overview() -> Figure:
    """What people come for: a converted model's quality, long sequences beside the paper, time against length."""
    figure, panels = plt.subplot_mosaic(
        [["kept", "lra"], ["time", "time"]], figsize=(WIDE, 6.4), layout="constrained", height_ratios=(1.25, 1)
    )
    kept, lra, time = panels.values()
    _converted(kept, "A BERT, its attention replaced")
    _beside_the_paper(lra)
    colours = {"softmax": TRUTH, "gmm-rks": LEARNED, "generative-prf": GREEN, "performer": FIXED}
    plot_against_length(time, _times("readme", "attention-times"))
    for line in time.lines:
        line.set_color(colours[str(line.get_label())])
    time.tick_params(axis="x", labelrotation=0)
    time.yaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
    time.set_ylabel("seconds")
    time.set_title("Forward and backward of one attention, one core")
    time.legend(loc="upper left")
    return figure


def _converted(axes: Axes, title: str) -> None:
    """Masked tokens that a BERT of reactions gets right, by what replaced its attention."""
    rows = json.loads(CONVERTED.read_text())["rows"]
    alone = {row["R"]: row for row in rows if row["setting"] == "reactions" and row["trained"].endswith("0 steps")}
    both = [row for row in rows if row["setting"] == "near and far"]
    (softmax,) = (row for row in both if row["attention"] == "softmax")
    (fixed,) = (row for row in rows if row["setting"] == "reactions" and row["attention"] == "performer")
    first, second = (row for row in both if row["attention"] != "softmax")
    bars = [
        ("softmax", softmax, RIGHT, TRUTH),
        ("performer", fixed, RIGHT, FIXED),
        (f"near alone, w={first['w']}", first, "near alone, %", FROZEN),
        ("kernel, R=128", alone[128], RIGHT, LEARNED),
        ("kernel, R=256", alone[256], RIGHT, LEARNED),
        (f"near and far, R={first['R']}", first, RIGHT, GREEN),
        (f"near and far, R={second['R']}", second, RIGHT, GREEN),
    ]
    for place, (_, row, field, colour) in enumerate(bars):
        value = statistics.fmean(float(word) for word in row[field].partition(" (")[0].split(" to "))
        _bar(axes, place, value, colour, width=0.7, label=(place, "center"))
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars], rotation=35, ha="right", rotation_mode="anchor")
    axes.set(ylim=(0, 108), ylabel="masked tokens right, %", title=title)


def _beside_the_paper(axes: Axes) -> None:
    """For every task of Long Range Arena that was run at its real length: the best kernel and others, and the paper."""
    of_task = {
        task: values_by_attention(
            [row for row in _rows("lengths") if row["setting"] == f"{task}-workstation: accuracy, %"]
        )
        for task in LRA
    }
    of_task = {task: values for task, values in of_task.items() if values}
    for group, (task, values) in enumerate(of_task.items()):
        here = {name: statistics.fmean(seeds.values()) for name, seeds in values.items()}
        paper = {row.attention: row.accuracy(task) or 0.0 for row in paper_numbers.LRA}
        best = max(here.get(name, 0.0) for name in KERNELS)
        bars = [
            ("softmax, the paper", paper["softmax"], "#bbbbbb"),
            ("best of the paper's kernels, the paper", max(paper[name] for name in KERNELS), FROZEN),
            ("softmax, here", here.get("softmax"), TRUTH),
            ("performer, here", here.get("performer"), FIXED),
            ("best of the same kernels, here", best, LEARNED),
        ]
        for number, (name, value, colour) in enumerate(bars):
            place = group + (number - 2) * 0.17
            if value is not None:
                _bar(axes, place, value, colour, width=0.16, label=(place, "center"))
            axes.bar([group], [0], color=colour, label=name if group == 0 else None)
    titles = [paper_numbers.task_title(task) for task in of_task]
    axes.set_xticks(range(len(titles)), titles)
    axes.set(
        ylim=(0, 100), xlim=(-0.6, len(titles) - 0.4), ylabel="accuracy, %", title="Long Range Arena, real lengths"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=9, handlelength=1)


def learned() -> Figure:
    """What learning a kernel does to accuracy, where it does most."""
    figure, (recall, sums) = plt.subplots(1, 2, figsize=(WIDE, 4), layout="constrained")
    recalled = [row for row in json.loads(EVIDENCE.read_text())["rows"] if row["setting"] == RECALL]
    _learned_beside_frozen(recall, recalled, "Recall of 16 pairs, three seeds")
    _learned_beside_frozen(sums, _summed(), "Sums of 64 positions, three seeds")
    sums.set_ylabel("")
    figure.legend(*recall.get_legend_handles_labels(), loc="outside upper center", ncols=4, handlelength=1)
    return figure


def converted() -> Figure:
    """What a converted model keeps."""
    figure, axes = plt.subplots(figsize=(WIDE, 4), layout="constrained")
    _converted(axes, "A BERT of chemical reactions, 12 layers: its attention replaced, nothing but kernels trained")
    return figure


def near_and_far() -> Figure:
    """The weights of softmax, of a kernel that was fitted to them, and of a window and such a kernel together."""
    length, size, window = 48, 16, 3
    draws = torch.Generator().manual_seed(0)
    topic = torch.randn(4, size, generator=draws)[torch.arange(length) // 12] * 1.2
    q, k = (topic + 0.5 * torch.randn(length, size, generator=draws) for _ in range(2))
    scores = q @ k.T / size**0.5 + 2.5 * (-((torch.arange(length)[:, None] - torch.arange(length)) ** 2) / 2.0).exp()
    softmax = scores.softmax(-1)
    near = (torch.arange(length)[:, None] - torch.arange(length)).abs() <= window

    def fitted(exact: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        frequencies, gain = torch.randn(6, size) / 4, torch.zeros(())
        parameters = [frequencies.requires_grad_(), gain.requires_grad_()]
        optimiser = torch.optim.Adam(parameters, lr=0.05)
        for _ in range(300):
            far = (q @ frequencies.T).exp() @ (k @ frequencies.T).softmax(-1).T
            weights = far + exact * (scores + gain).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            optimiser.zero_grad()
            (weights - softmax).square().sum().backward()
            optimiser.step()
        return weights.detach()

    panels = {
        "softmax": softmax,
        "a kernel, R = 6": fitted(torch.zeros(())),
        "near (w = 3) and far": fitted(near.float()),
    }
    figure, grid = plt.subplots(2, 3, figsize=(WIDE, 4.6), layout="constrained", height_ratios=(1.9, 1))
    for (above, below), (title, weights) in zip(grid.T, panels.items(), strict=True):
        above.imshow(weights.sqrt().numpy(), vmin=0, vmax=float(softmax.max()) ** 0.5)
        above.set(title=title, xlabel="key", xticks=[0, 24, 47], yticks=[0, 24, 47])
        below.fill_between(range(length), softmax[24], step="mid", color="#cccccc")
        below.step(range(length), weights[24], where="mid", color=TRUTH if weights is softmax else LEARNED)
        below.set(xlabel="key, for query 24", xticks=[0, 24, 47], ylim=(0, None))
    grid[0, 0].set_ylabel("query")
    grid[1, 0].set_ylabel("weight")
    return figure


def _times(file: str, setting: str) -> dict[str, list[tuple[int, float]]]:
    """Lengths and seconds of every attention that `klformer bench attention` measured."""
    rows = [row for row in _rows(file) if row["setting"] == setting]
    lengths = lengths_of(rows)
    return {name: list(zip(lengths, values_of(rows, name, "seconds"), strict=True)) for name in names_of(rows)}


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
    figure, axes = plt.subplots(figsize=(WIDE, 4.1), layout="constrained")
    axes.set(xlim=(0, 18.05), ylim=(0, 8.2))
    axes.axis("off")
    boxes = {
        "x": (0.05, 3.3, 2.2, 1.2, "tokens\n(B, L, model)", "white"),
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
        "read": (12.75, 3.3, 2.5, 1.8, r"$\phi(q_i)$ reads it," + "\nthen divides", "#d8efe5"),
        "out": (15.8, 3.3, 2.2, 1.8, "output\n(B, L, model)", "white"),
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
        axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=9)
    across = [("x", "proj"), ("proj", "map"), ("map", "state"), ("state", "read"), ("read", "out")]
    across += [("noise", "dist"), ("dist", "omega")]
    for start, end in across:
        (a, b, w, h, *_), (c, d, _, e, *_) = boxes[start], boxes[end]
        _arrow(axes, (a + w, b + h / 2), (c, d + e / 2))
    _arrow(axes, (10.85, 6.2), (8.8, 4.9))
    _arrow(axes, (7.25, 1.7), (7.25, 2.7))
    axes.text(0.05, 7.5, "Learned: blue\nand orange.\nGiven: grey.", fontsize=9, va="top")
    axes.text(
        12.6,
        7.4,
        "Nothing of the size L x L\nor L x R is ever held.\nThe state is all that\ndecoding needs.",
        fontsize=9,
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
            kernel = cast(KernelizedAttention, attention).kernel
            estimate = kernel.estimate(torch.zeros(1, 1, 1, 1), distance.view(1, 1, -1, 1))
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
            cmap=ListedColormap(["#eeeeee", LEARNED]),
            edgecolors="white",
            vmin=0,
            vmax=1,
        )
        axes.set(title=title, xlabel="key", aspect="equal", xticks=[0.5, 7.5], xticklabels=["0", "7"])
        axes.set(yticks=[0.5, 7.5], yticklabels=["7", "0"])
    grid[0].set_ylabel("query")
    return figure


def attention() -> Figure:
    """Time of every attention against the length: on the left kernels, on the right other attentions."""
    lines = _times("attentions", "time")
    tokens = [length for length, _ in lines["softmax"]]
    times = {name: [1000 * seconds for _, seconds in points] for name, points in lines.items()}
    groups = {"rks": LEARNED, "prf": GREEN, "elu": FIXED}
    members = {
        kind: [name for name in times if {"performer": "prf"}.get(name, name.rpartition("-")[2]) == kind]
        for kind in groups
    }
    others = [name for name in times if name not in sum(members.values(), ["softmax"])]
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 4.8), layout="constrained", sharey=True)
    for axes, title in ((left, "kernels and softmax"), (right, "other attentions and softmax")):
        axes.plot(tokens, times["softmax"], color=TRUTH, linewidth=2.6)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(tokens, [f"{number:,}" for number in tokens], rotation=35, ha="right", rotation_mode="anchor")
        axes.set(title=title, xlabel="tokens L", xlim=(tokens[0], tokens[-1] * 14))
        axes.yaxis.set_major_formatter(lambda time, _: f"{time:,.0f}")
        axes.grid(alpha=0.3)
    left.set_ylabel("ms, forward and backward")
    for number, (kind, colour) in enumerate(groups.items()):
        for name in members[kind]:
            left.plot(tokens, times[name], STYLES[number], color=colour, linewidth=1.4)
    ends = {kind: sum(times[name][-1] for name in members[kind]) / len(members[kind]) for kind in groups}
    _name_ends(left, tokens[-1], {"softmax": times["softmax"][-1]}, [TRUTH])
    left.text(tokens[-1] * 1.2, ends["elu"] * 0.55, "linear-elu", color=FIXED, va="center")
    for kind, height in (("rks", 3.0), ("prf", 1.2)):
        names = ", ".join(name.removesuffix(f"-{kind}") for name in members[kind])
        left.text(tokens[-1] * 1.2, ends[kind] * height, fill(f"{kind}: {names}", 20), color=groups[kind], va="center")
    for name in others:
        right.plot(tokens, times[name], color="#6b7078", linewidth=1.4)
    last = {name: times[name][-1] for name in (*others, "softmax")}
    _name_ends(right, tokens[-1], last, ["#4a4f57"] * len(others) + [TRUTH])
    return figure


def _name_ends(axes: Axes, place: float, ends: Mapping[str, float], colours: Sequence[str]) -> None:
    """Names of lines at their right ends, apart from each other."""
    lowest = 0.0
    for (name, time), colour in sorted(zip(ends.items(), colours, strict=True), key=lambda end: end[0][1]):
        lowest = max(lowest * 1.4, time)
        axes.plot([place, place * 1.15], [time, lowest], color=colour, linewidth=0.5)
        axes.text(place * 1.2, lowest, name, color=colour, va="center", fontsize=10)


def variance() -> Figure:
    """The three measures of variance over draws, by attention and task."""
    return draw_dots(_varying())


def correlations() -> Figure:
    """These measures against each other."""
    return draw_correlations(_varying(), correlate(_varying()))


def _varying() -> list[dict[str, Any]]:
    """Variance of the paper's kernels and `performer`, without that of frozen kernels."""
    rows = [row for row in _rows("variance") if row["setting"] == row["task"]]
    order = [*KERNELS, "performer"]
    return sorted(rows, key=lambda row: (row["task"] != "text", order.index(row["attention"])))


def eigenvalues() -> Figure:
    """Eigenvalues of the frequencies' covariance before training and after."""
    return draw_summary(_rows("eigenvalues"))


def gradients() -> Figure:
    """Learning curves at three sparsities, and how much gradients vary on the way."""
    return gradients_command.draw(_rows("gradients"), _rows("curves"))


def _of(name: str, setting: str) -> list[dict[str, Any]]:
    """Rows of one setting."""
    return [row for row in _rows(name) if row["setting"] == setting]


def kernel_profiles() -> Figure:
    """The kernels of a model before and after training."""
    return kernel_figures.draw_profiles(_of("kernel", "profiles"))


def kernel_attention() -> Figure:
    """Where that model's CLS attends."""
    return kernel_figures.draw_attention(_of("kernel", "attention"))


def kernel_planted() -> Figure:
    """A planted kernel and the one that was learned."""
    return kernel_figures.draw_planted(_of("kernel-planted", "planted"), _of("kernel-planted", "planted-profiles"))


def kernel_learning() -> Figure:
    """The same while it was learned."""
    return kernel_figures.draw_learning(_of("kernel-planted", "learning"), _of("kernel-planted", "learning-profiles"))


def theorem3() -> Figure:
    """The errors of estimates, by formulas and simulated."""
    return mse_figures.draw_theorem(_of("theorem3", "cases"), mse_measure.Grid())


def pretraining() -> Figure:
    """Hidden tokens guessed against steps, by attention."""
    return pretraining_command.draw(_rows("pretraining"), _rows("pretraining-curves"))


def self_pretraining() -> Figure:
    """Validation accuracy against all steps, those of pretraining included, from scratch and self-pretrained."""
    rows = _rows("self-pretraining-curves")
    figure, panels = plt.subplots(1, 2, figsize=(WIDE, 4.4), layout="constrained")
    for axes, (task, title) in zip(panels, (("text", "Text"), ("listops", "ListOps")), strict=True):
        names = dict.fromkeys(row["attention"] for row in rows if row["setting"].startswith(task))
        for name, colour in zip(names, COLOURS, strict=False):
            of_name = [row for row in rows if row["attention"] == name]
            before = max(row["step"] for row in of_name if row["setting"].startswith(f"{task}-masked"))
            for start, style, first in (("", "-", 0), ("-pretrained", "--", before)):
                setting = f"{task}-laptop{start}: accuracy, %"
                values: dict[int, list[float]] = {}
                for row in of_name:
                    if row["setting"] == setting:
                        values.setdefault(first + row["step"], []).append(row["value"])
                means = [statistics.fmean(found) for found in values.values()]
                label = f"{name}, {'pretrained' if start else 'from scratch'}"
                axes.plot(list(values), means, style, marker="o", markersize=4, color=colour, label=label)
        axes.set(title=title, xlabel="steps, with those of pretraining", xlim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation accuracy, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


#: Figures of the docs, and of the pages of research/.
USED: dict[str, Callable[[], Figure]] = {
    "overview": overview,
    "learned": learned,
    "converted": converted,
    "near-and-far": near_and_far,
    "architecture": architecture,
    "concept-kernel": kernel,
    "concept-noise": noise,
    "concept-masks": masks,
    "attention": attention,
    "kernel-learning": kernel_learning,
    "mse": theorem3,
}
STUDIED: dict[str, Callable[[], Figure]] = {
    "lra": lra,
    "lengths": lengths,
    "sparsity": sparsity,
    "variance": variance,
    "variance-correlations": correlations,
    "eigenvalues": eigenvalues,
    "gradients": gradients,
    "pretraining": pretraining,
    "self-pretraining": self_pretraining,
    "kernel-profiles": kernel_profiles,
    "kernel-attention": kernel_attention,
    "kernel-planted": kernel_planted,
}
DRAWINGS = USED | STUDIED


def place(name: str) -> Path:
    """Return the file of a figure."""
    return ROOT / ("docs" if name in USED else "research") / "figures" / f"{name}.png"


if __name__ == "__main__":
    for wanted in sys.argv[1:] or DRAWINGS:
        save(DRAWINGS[wanted](), place(wanted))
        print(place(wanted).relative_to(ROOT))
