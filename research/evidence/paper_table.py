"""Tables of pages that put runs of Long Range Arena beside the paper's numbers."""

from collections.abc import Sequence
from statistics import fmean

import torch

from klformer.attention import AttentionSpec
from klformer.lab.analysis.cells import Row, markdown, mean_and_error, values_by_attention
from klformer.lab.report.paper_numbers import LRA, task_title
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
