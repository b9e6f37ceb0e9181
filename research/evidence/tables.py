"""The kinds of tables that a page of the docs may have, in Markdown.

    learned       an attention learned, frozen, and the difference of pairs of one seed
    against       every attention of one setting beside others that it is measured against, paired by seed
    settings      attentions down, settings across
    tasks         the same with the mean over tasks, best first, and that of pairs with softmax
    means         columns that the page chooses, each the mean over seeds with its standard error:
                  by=, show=, and within=seed where a run has several rows (columns.py)
    paired        columns that the page chooses, each the difference of pairs of one seed: by=, show=, of=A minus=B,
                  which are attentions, or what the field between= has; several of each give a row a pair, and
                  across= a field whose values are columns (columns.py)
    fields        the data as it is

    gains         a setting from scratch beside the same from pretrained runs, and the difference of pairs of one seed
    paper         runs beside the paper's numbers (paper_table.py)

Whatever a command prints is named by the function that prints it (printed.py).

A mean has its standard error over seeds behind it. A difference is bold where it is more than two standard errors, of
at least three pairs. Nothing else is called better.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from klformer.attention import AttentionSpec, attention_options
from klformer.lab.analysis.cells import (
    Row,
    difference,
    is_beyond,
    markdown,
    mean_and_error,
    paired,
    values_by_attention,
    values_by_setting,
)
from klformer.lab.analysis.evidence.command import learned_or_frozen
from klformer.lab.runs.naming import PRETRAINED
from research.evidence.columns import differences, means
from research.evidence.paper_table import beside_the_paper

#: What every attention of a table `against` is measured against, beside its own frozen self.
_REFERENCES = ("softmax", "performer", "linear-elu")


def against_others(rows: Sequence[Row]) -> str:
    """Runs of one setting, one row each: their attentions, best first, with the standard error of their mean over
    seeds, and paired differences to the references and to the frozen self.

    Over draws: the deviation of a run's metric over draws of its frequencies, mean over seeds. The rank goes from one
    more than there are better attentions to as many as are not worse, where better and worse are marked differences.
    """
    by_attention = values_by_attention(rows)
    references = [name for name in _REFERENCES if name in by_attention]
    by_draw = {name: [row["over_draws"] for row in rows if row["attention"] == name] for name in by_attention}
    headings = ["rank", "attention", "seeds", "mean", "over draws", *(f"- {name}" for name in references)]
    lines = []
    for name, values in sorted(by_attention.items(), key=lambda found: -statistics.fmean(found[1].values())):
        others = [by_attention[reference] if reference != name else {} for reference in references]
        others.append(by_attention.get(_frozen(name) or "", {}))
        mean = mean_and_error(list(values.values()))
        differences = (difference(*paired(values, other)) for other in others)
        over_draws = [deviation for deviation in by_draw[name] if deviation is not None]
        spread = f"{statistics.fmean(over_draws):.2f}" if over_draws else ""
        rank = _rank(values, list(by_attention.values()))
        lines.append([rank, f"`{name}`", str(len(values)), mean, spread, *differences])
    return markdown([*headings, "- frozen self"], lines)


def by_setting(rows: Sequence[Row]) -> str:
    """Runs, one row each: the mean of every attention in every setting with the standard error over seeds, and how many
    those are. A dash means no result."""
    headings, lines = _across_settings(rows)
    return markdown(headings, [cells for _, cells in lines])


def by_task(rows: Sequence[Row]) -> str:
    """The same of tasks whose metrics may be averaged, with the mean over all tasks: the best is first, and attentions
    that lack a task are last. Means may be of other seeds than softmax's; the difference to softmax, in brackets with
    the number of pairs, is of those that both have in all tasks."""
    headings, lines = _across_settings(rows)
    lines.sort(key=lambda line: math.inf if line[0] is None else -line[0])
    by_seed = _means_by_seed(rows)
    reference = by_seed.get(_REFERENCES[0])
    table = []
    for average, cells in lines:
        cells = [*cells, "-" if average is None else f"{average:.2f}"]
        if reference is not None:
            values = by_seed[cells[0].strip("`")]
            mean, error, pairs = paired(values, {} if values is reference else reference)
            cells.append(f"{difference(mean, error, pairs)} ({pairs})" if pairs else "")
        table.append(cells)
    return markdown([*headings, "mean of all", *([f"- {_REFERENCES[0]}"] if reference is not None else [])], table)


def _means_by_seed(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Of every attention the mean over all settings, by those seeds that it has in all of them."""
    settings = list(values_by_setting(rows).values())
    found = {}
    for name in dict.fromkeys(row["attention"] for row in rows):
        of_settings = [values.get(name, {}) for values in settings]
        seeds = [seed for seed in of_settings[0] if all(seed in values for values in of_settings)]
        found[name] = {seed: statistics.fmean(values[seed] for values in of_settings) for seed in seeds}
    return found


def _across_settings(rows: Sequence[Row]) -> tuple[list[str], list[tuple[float | None, list[str]]]]:
    """Headings, and for every attention its mean over all settings, if it has all, with its cells."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    by_attention = {
        setting: values_by_attention([row for row in rows if row["setting"] == setting]) for setting in settings
    }
    lines = []
    for name in dict.fromkeys(row["attention"] for row in rows):
        found = [list(by_attention[setting].get(name, {}).values()) for setting in settings]
        cells = [f"{mean_and_error(values)} ({len(values)})" if values else "-" for values in found]
        average = statistics.fmean(statistics.fmean(values) for values in found) if all(found) else None
        lines.append((average, [f"`{name}`", *cells]))
    return ["attention", *(setting.partition(":")[0] for setting in settings)], lines


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


def all_fields(rows: Sequence[Row]) -> str:
    """The fields of the rows as columns, but for the setting: names are headings, and numbers have the digits that they
    have in the data. What a row does not have is empty."""
    headings = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "setting"]
    lines = []
    for row in rows:
        cells = {name: "" if row.get(name) is None else str(row[name]) for name in headings}
        if "attention" in cells:
            cells["attention"] = f"`{cells['attention']}`"
        lines.append(list(cells.values()))
    return markdown(headings, lines)


#: What a page may ask for, by its first word.
KINDS: Mapping[str, Callable[..., str]] = {
    "learned": learned_or_frozen,
    "against": against_others,
    "settings": by_setting,
    "tasks": by_task,
    "means": means,
    "paired": differences,
    "fields": all_fields,
    "gains": gains,
    "paper": beside_the_paper,
}
#: What a kind takes besides its rows.
COLUMN_OPTIONS: Mapping[str, Sequence[str]] = {
    "means": ("by", "show", "within"),
    "paired": ("by", "show", "of", "minus", "between", "across"),
}


def _frozen(attention: str) -> str | None:
    """The frozen self of an attention, if it has one."""
    spec = AttentionSpec.parse(attention)
    if "frozen" in spec.options or "frozen" not in attention_options(spec.name):
        return None
    return AttentionSpec(name=spec.name, options=spec.options | {"frozen": True}).label()


def _rank(values: Mapping[int, float], all_values: Sequence[Mapping[int, float]]) -> str:
    differences = [paired(values, others) for others in all_values if others is not values]
    beyond = [mean for mean, error, pairs in differences if is_beyond(mean, error, pairs)]
    first = 1 + sum(mean is not None and mean < 0 for mean in beyond)
    last = len(all_values) - sum(mean is not None and mean > 0 for mean in beyond)
    return str(first) if first == last else f"{first} to {last}"
