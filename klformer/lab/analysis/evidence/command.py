"""`klformer analyze evidence`: does learning the kernel pay? Learned runs beside frozen ones, from their results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from klformer.attention import AttentionSpec
from klformer.attention.kernelized import KernelizedAttention
from klformer.errors import ArgumentError
from klformer.lab.analysis.cells import Row, difference, with_spread
from klformer.lab.analysis.cells import markdown as as_markdown
from klformer.lab.analysis.evidence.chart import draw
from klformer.lab.analysis.evidence.measure import Measured, comparisons, error_of, measured
from klformer.lab.analysis.kernel.planted_results import held_out_pairs, planted_error
from klformer.lab.analysis.output import Count, RunsAnalysis, print_table, write_results
from klformer.lab.runs.changes import LENGTH, MAY_CHANGE, flatten
from klformer.lab.runs.config import ExperimentConfig
from klformer.lab.runs.folder import RunFolder, what_it_took
from klformer.lab.runs.load import load_run
from klformer.lab.runs.naming import selecting_metric, setting_and_start
from klformer.lab.runs.rates import FIELD as RATE
from klformer.lab.runs.rates import at_chosen_rates
from klformer.lab.tasks import Planted
from klformer.lab.training.progress import SilentReporter

#: Fields that make no other result, and the learning rate: one is chosen for every model, and learned and frozen runs
#: are a pair whatever each of them took.
_UNNAMED = (MAY_CHANGE - LENGTH) | {RATE}


def swept_settings(configs: Sequence[ExperimentConfig]) -> list[str]:
    """Return the setting of every run with what was swept in it: `sparsity0.5-laptop training.resample_every=10`.

    A field was swept in a setting where runs of one attention and one seed differ in it. Without any, the setting is
    all there is.
    """
    settings = [setting_and_start(config) for config in configs]
    fields = [_fields(config) for config in configs]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for setting, config, values in zip(settings, configs, fields, strict=True):
        groups.setdefault((setting, config.attention.label(), config.seed), []).append(values)
    swept: dict[str, dict[str, None]] = {}
    for (setting, _, _), group in groups.items():
        differing = [name for name in group[0] if len({str(values.get(name)) for values in group}) > 1]
        swept.setdefault(setting, {}).update(dict.fromkeys(differing))
    return [
        " ".join([setting, *(f"{name}={values.get(name)}" for name in swept[setting])])
        for setting, values in zip(settings, fields, strict=True)
    ]


def _fields(config: ExperimentConfig) -> dict[str, Any]:
    """Return what a sweep may change, besides the attention, which rows name anyway."""
    tree = flatten(config.model_dump(mode="json", exclude={"attention"}))
    return {name: value for name, value in tree.items() if "." in name and name not in _UNNAMED}


CAPTION = (
    "Every attention learned and frozen, mean over seeds on the test set (lines: its standard error; NAME_std: the "
    "deviation), and the mean difference of pairs of one seed with its standard error."
)
RUNS_CAPTION = "The same numbers run by run, with what it took to get them."
CURVES_CAPTION = "The selecting metric on the validation set against steps, run by run."
DRAWS = Count("draws", full=50, quick=5)


@dataclass(frozen=True, kw_only=True)
class EvidenceAnalysis(RunsAnalysis):
    """Learned kernels beside the same kernels frozen, paired by seed: what learning is worth.

    Runs of the task planted are compared by the error of their kernel as well. Of several learning rates, that is taken
    which is best on validation at the first seed that has several. Runs of a sweep are settings of their own, named
    after the field and its value. Example:

      klformer analyze evidence runs/recall-*
    """

    counts: ClassVar[tuple[Count[Any], ...]] = (DRAWS,)

    draws: int | None = None
    """Draws of the frequencies for the error of planted kernels; 50, or 5 with --quick."""


def run(options: EvidenceAnalysis) -> None:
    """Write evidence.json, .csv, .md, .svg and .png, runs.json and runs-curves.json with .csv, and print the table."""
    draws = options.choose(DRAWS)
    finished = list(_finished(options.runs))
    if not finished:
        raise ArgumentError(f"no finished run in {', '.join(map(str, options.runs))}")
    folders = at_chosen_rates(finished)
    left_out = len(finished) - len(folders)
    settings = swept_settings([folder.config() for folder in folders])
    by_run = [
        (folder, list(_numbers(folder, setting, draws))) for folder, setting in zip(folders, settings, strict=True)
    ]
    numbers = [number for _, found in by_run for number in found]
    rows = [comparison.as_row() for comparison in comparisons(numbers)]
    made_of = {"runs": len(folders), "draws": draws}
    write_results(options.out, "evidence", caption=CAPTION, rows=rows, settings=made_of, figure=draw(rows))
    runs = [_run_row(folder, number, found[0]) for folder, found in by_run for number in found]
    write_results(options.out, "runs", caption=RUNS_CAPTION, rows=runs, settings=made_of)
    curves = [point for folder, found in by_run for point in _curve(folder, found[0])]
    write_results(options.out, "runs-curves", caption=CURVES_CAPTION, rows=curves, settings=made_of)
    (options.out / "evidence.md").write_text(markdown(rows))
    console = Console(width=max(140, Console().width))
    print_table(console, rows, CAPTION)
    if left_out:
        console.print(f"{left_out} runs with learning rates that are not the best on validation are left out")
    written = "evidence.json, .csv, .md, .svg and .png, runs.json with one row a run, and runs-curves.json"
    console.print(f"{written}, written to {options.out}", highlight=False)


def _finished(places: Sequence[Path]) -> Iterator[RunFolder]:
    """Yield every finished run once, also one that is named twice."""
    seen: set[Path] = set()
    for place in places:
        for path in [place] if RunFolder(place).is_run() else sorted(place.iterdir() if place.is_dir() else []):
            folder = RunFolder(path)
            if path.resolve() not in seen and folder.is_run() and folder.result() is not None:
                seen.add(path.resolve())
                yield folder


def _numbers(folder: RunFolder, setting: str, draws: int) -> Iterator[Measured]:
    """Yield the selecting metric on the test set, and the error of a planted kernel."""
    result, config = folder.result(), folder.config()
    assert result is not None, "only finished runs are asked"
    metric = selecting_metric(result)
    value = metric.scaled(result["test"][metric.name])
    yield measured(result, f"{setting}: {metric.label}", value, run=str(folder.path))
    if config.task == Planted.name:
        loaded = load_run(folder.path, SilentReporter())
        assert isinstance(loaded.task, Planted)
        kernels = [module.double() for module in loaded.model.modules() if isinstance(module, KernelizedAttention)]
        if kernels and kernels[0].kernel.spectrum is not None:
            error = planted_error(kernels[0], loaded.task, *held_out_pairs(loaded.task), draws=draws, seed=3)
            yield measured(result, f"{setting}: error of the mean kernel", error.of_mean, run=str(folder.path))


def _over_draws(result: dict[str, Any]) -> float | None:
    """Return the deviation of the selecting metric over draws, None where there is one draw."""
    metric = selecting_metric(result)
    deviation = result["test"].get(f"{metric.name}_std")
    return None if deviation is None or result["test"]["draws"] < 2 else metric.scaled(deviation)


def _run_row(folder: RunFolder, number: Measured, first: Measured) -> dict[str, Any]:
    """Return one number of one run, of which `first` is the selecting metric, and what it depends on."""
    result = folder.result()
    assert result is not None, "only finished runs are asked"
    return {
        "setting": number.setting,
        "attention": AttentionSpec.parse(result["attention"]).label(),
        "seed": number.seed,
        "value": number.value,
        "over_draws": _over_draws(result) if number is first else None,
        "test_examples": result["test"]["num_examples"],
        "draws": result["test"]["draws"],
        "learning_rate": folder.config().optimiser.learning_rate,
        **what_it_took(result),
    }


def _curve(folder: RunFolder, number: Measured) -> Iterator[dict[str, Any]]:
    """Yield one row an evaluation on the validation set."""
    result = folder.result()
    assert result is not None, "only finished runs are asked"
    metric = selecting_metric(result)
    attention = AttentionSpec.parse(result["attention"]).label()
    for point in folder.metrics("validation"):
        known = {"setting": number.setting, "attention": attention, "seed": number.seed}
        yield known | {"step": point["step"], "value": metric.scaled(point[metric.name])}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Write the rows as tables for a page, one a setting."""
    parts = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        parts.append(f"**{setting}**\n\n{learned_or_frozen([row for row in rows if row['setting'] == setting])}\n")
    return "\n".join(parts)


def learned_or_frozen(rows: Sequence[Row]) -> str:
    """Write a table of attentions learned and frozen, each with its standard error, and the difference; bold where it
    is significant. Of several settings, each row names its own. Rows are comparisons, or runs, which are compared here.
    """
    if "value" in rows[0]:
        runs = (measured(row, row["setting"], row["value"]) for row in rows)
        rows = [comparison.as_row() for comparison in comparisons(runs)]
    headings = ["attention", "draw", "seeds", "learned", "frozen", "learned - frozen"]
    several = len({row["setting"] for row in rows}) > 1
    if several:
        headings = ["setting", *headings]
    lines = []
    for row in rows:
        cells = [
            f"`{row['attention']}`",
            "" if row["draw"] == "none" else row["draw"],
            str(row["seeds"]),
            with_spread(row["learned"], error_of(row, "learned")),
            with_spread(row["frozen"], error_of(row, "frozen")),
            difference(row["difference"], row["standard_error"], row["pairs"]),
        ]
        lines.append([row["setting"].partition(":")[0], *cells] if several else cells)
    return as_markdown(headings, lines)
