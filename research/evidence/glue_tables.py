"""Tables of the docs on GLUE and on pretraining, from one row a run and metric (`glue.json`, `runs.json`).

gains        a setting from scratch beside the same from pretrained runs, and the difference of pairs of one seed
glue         models down, tasks across, each model's numbers above the paper's
glue-orders  for every task how the order of the models compares with the paper's, by rank correlation
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torchmetrics.functional import spearman_corrcoef

from klformer.attention import AttentionSpec
from klformer.errors import ArgumentError
from klformer.lab.analysis.cells import Row, difference, markdown, mean_and_error, paired, values_by_setting
from klformer.lab.report.paper_numbers import glue_row
from klformer.lab.runs.naming import PRETRAINED

#: Of fewer models no order is compared.
_FEWEST = 3


def gains(rows: Sequence[Row]) -> str:
    """Runs, one row each, of settings from scratch and from pretrained runs; attentions that have both."""
    settings = values_by_setting(rows)
    lines = []
    for started, tuned in settings.items():
        setting = started.replace(PRETRAINED, "")
        scratch = settings.get(setting, {}) if PRETRAINED in started else {}
        for attention in (name for name in tuned if name in scratch):
            cells = [mean_and_error(list(found[attention].values())) for found in (scratch, tuned)]
            gain = paired(tuned[attention], scratch[attention])
            lines.append([setting, f"`{attention}`", str(gain[2]), *cells, difference(*gain)])
    return markdown(["setting", "attention", "pairs", "from scratch", "pretrained", "difference"], lines)


def glue(rows: Sequence[Row]) -> str:
    """Mean and standard error of every model on every task, and below it what the paper has for it, in %."""
    settings = values_by_setting(rows)
    lines = []
    for attention in dict.fromkeys(row["attention"] for row in rows):
        lines.append([f"`{attention}`", *(_mean_of(found.get(attention, {})) for found in settings.values())])
        if paper := _paper(attention):
            lines.append(["paper", *(_shown(paper.get(_cell(setting))) for setting in settings)])
    return markdown(["model", *map(_cell, settings)], lines)


def glue_orders(rows: Sequence[Row]) -> str:
    """Spearman's rank correlation, over the models that both have, of our means and the paper's numbers; the best model
    of each. Last the mean over all numbers that both have.

    Raises:
        ArgumentError: there are too few models.
    """
    ours: dict[str, dict[str, float]] = {}
    papers: dict[str, dict[str, float]] = {}
    for setting, found in values_by_setting(rows).items():
        cell = _cell(setting)
        known = {name: _paper(name)[cell] for name in found if cell in _paper(name)}
        if len(known) >= _FEWEST:
            ours[cell] = {name: statistics.fmean(found[name].values()) for name in known}
            papers[cell] = known
    if not ours:
        raise ArgumentError(f"an order is of {_FEWEST} models of the paper at least, in one setting")
    lines = [_order(cell, values, papers[cell]) for cell, values in ours.items()]
    complete = set.intersection(*map(set, ours.values()))
    if len(complete) >= _FEWEST:
        lines.append(_order("mean of all", _means(ours, complete), _means(papers, complete)))
    return markdown(["", "models", "rank correlation", "best here", "best in the paper"], lines)


def _means(tables: Mapping[str, Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    return {name: statistics.fmean(values[name] for values in tables.values()) for name in sorted(names)}


def _order(heading: str, ours: Mapping[str, float], paper: Mapping[str, float]) -> list[str]:
    pairs = torch.tensor([[ours[name], paper[name]] for name in ours], dtype=torch.float64)
    is_flat = any(len(column.unique()) == 1 for column in pairs.T)
    correlation = "-" if is_flat else f"{spearman_corrcoef(*pairs.T):+.2f}"
    return [heading, str(len(ours)), correlation, _best(ours), _best(paper)]


def _best(values: Mapping[str, float]) -> str:
    top = max(values.values())
    return ", ".join(f"`{name}`" for name, value in values.items() if value == top)


def _paper(attention: str) -> dict[str, float]:
    """The paper's numbers in % by the heading of their column."""
    spec = AttentionSpec.parse(attention)
    cells = glue_row(spec.name, spec.options)
    return {_name(task, metric, part): 100 * value for (task, metric, part), value in cells.items()}


def _name(task: str, metric: str, part: str) -> str:
    return f"{task} {metric}" if part == "test" else f"{task} {part} {metric}"


def _cell(setting: str) -> str:
    """`sst2-laptop-pretrained: accuracy, %` -> `sst2 accuracy`."""
    name, _, metric = setting.partition(": ")
    return f"{name.partition('-')[0]} {metric.removesuffix(', %')}"


def _mean_of(values: Mapping[int, float]) -> str:
    return f"{mean_and_error(list(values.values()))} ({len(values)})" if values else "-"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
