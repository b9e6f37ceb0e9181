"""Tables of the docs that put runs of Long Range Arena beside the paper's numbers.

paper           tasks: the paper's accuracy and ours, their difference, and what a run took
paper-averages  the tasks of the paper's last column, which is their average
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch

from klformer.attention import AttentionSpec
from klformer.lab.analysis.cells import Row, markdown, mean_and_error, values_by_attention
from klformer.lab.report.paper_numbers import LRA, LRA_TASKS, task_title
from klformer.lab.runs.config import build_model, preset

_PAPER = {row.attention: row for row in LRA}


def beside_the_paper(rows: Sequence[Row]) -> str:
    """Return a row for each attention of each task, best first: means over seeds, minutes of a processor, millions of
    tokens. The task is a column if there are several."""
    lines = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        task, _, name = setting.partition(":")[0].partition("-")
        of_task = [row for row in rows if row["setting"] == setting]
        for attention, values in sorted(
            values_by_attention(of_task).items(), key=lambda found: -fmean(found[1].values())
        ):
            runs = [row for row in of_task if row["attention"] == attention]
            config = preset(name, task, AttentionSpec.parse(attention))
            with torch.device("meta"):
                parameters = sum(weight.numel() for weight in build_model(config, config.make_task()).parameters())
            paper = _PAPER[attention].accuracy(task) if attention in _PAPER else None
            compared = ["", ""] if paper is None else [f"{paper:.2f}", f"{fmean(values.values()) - paper:+.2f}"]
            minutes = fmean(row["train_processor_seconds"] for row in runs) / 60
            tokens = fmean(row["train_tokens"] for row in runs) / 1e6
            here = [mean_and_error(list(values.values())), str(len(values))]
            lines.append([task_title(task), f"`{attention}`", compared[0], *here, compared[1]])
            lines[-1] += [f"{minutes:.1f}", f"{tokens:.0f}", f"{parameters:,}"]
    headings = ["task", "attention", "paper", "here", "seeds", "here - paper", "minutes", "M tokens", "parameters"]
    first = 0 if len({line[0] for line in lines}) > 1 else 1
    return markdown(headings[first:], [line[first:] for line in lines])


def averages(rows: Sequence[Row]) -> str:
    """Return the paper's average over three tasks beside ours, for the attentions that have runs of all three."""
    of_task: dict[str, dict[str, list[float]]] = {task: {} for task in LRA_TASKS}
    for row in rows:
        of_task.setdefault(row["setting"].partition("-")[0], {}).setdefault(row["attention"], []).append(row["value"])
    names = [name for name in _PAPER if name and all(name in of_task[task] for task in LRA_TASKS)]
    here = {name: [fmean(of_task[task][name]) for task in LRA_TASKS] for name in names}
    lines = [
        [f"`{name}`", *(f"{value:.2f}" for value in (*here[name], fmean(here[name]), _PAPER[name].row_average()))]
        for name in sorted(names, key=lambda name: -fmean(here[name]))
    ]
    return markdown(["attention", *LRA_TASKS, "average", "the paper's"], lines)


BESIDE_THE_PAPER: Mapping[str, Callable[..., str]] = {"paper": beside_the_paper, "paper-averages": averages}
