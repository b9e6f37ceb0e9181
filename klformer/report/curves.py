"""`klformer curves`: validation accuracy of several runs against steps, as a figure."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.backend_bases import FigureCanvasBase

from klformer.errors import ArgumentError, RunError
from klformer.plotting import line_style, save
from klformer.runs.folder import RunFolder
from klformer.runs.naming import attention_label
from klformer.training.log import read_lines


def draw_curves(folders: Sequence[Path], target: Path, *, title: str | None = None) -> None:
    """Write a figure with one line a run; the format is that of the target's ending.

    Raises:
        RunError: a folder is not a run's, or has nothing to show yet.
        ValueError: there is no folder, or the target's ending is no format of figures.
    """
    if not folders:
        raise ArgumentError("give at least one run: klformer curves runs/*")
    formats = FigureCanvasBase.get_supported_filetypes()
    if target.suffix[1:] not in formats:
        raise ArgumentError(f"{target} must end in one of {', '.join(formats)}")
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for number, folder in enumerate(folders):
        config = RunFolder(folder).config()
        points = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "validation"]
        if not points:
            raise RunError(f"{folder} has not been evaluated yet")
        axes.plot(
            [point["step"] for point in points],
            [100 * point["accuracy"] for point in points],
            marker="o",
            markersize=3,
            label=attention_label(config) + (f", seed {config.seed}" if config.seed else ""),
            **line_style(number),
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("validation accuracy, %")
    axes.grid(alpha=0.3)
    if title is not None:
        axes.set_title(title)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save(figure, target)
