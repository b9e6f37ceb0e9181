"""Several attentions, over several seeds, on one task: one run each, one table at the end."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from klformer.errors import ArgumentError
from klformer.files import write_text
from klformer.lab.runs.config import ExperimentConfig, build_model
from klformer.lab.runs.jobs import Job, train_several
from klformer.lab.runs.naming import attention_label, combined_score, selecting_metric, setting_name
from klformer.lab.runs.rates import FIELD, at_rate, best_rate
from klformer.lab.runs.sweep import Variant
from klformer.lab.runs.train import finished_result
from klformer.lab.tables import Cell, Table, number
from klformer.lab.training.processes import is_main_process
from klformer.lab.training.progress import Reporter, SilentReporter
from klformer.memory import MEBIBYTE


def comparison_name(variant: Variant) -> str:
    """Return the file of all results on one task, or of one sweep."""
    swept = "".join(f"-{part.partition('=')[0]}" for part in variant.label.split())
    return f"comparison-{setting_name(variant.config)}{swept}.json"


def compare(
    variants: Sequence[Variant],
    folder: Path,
    *,
    reporter: Reporter,
    jobs: int = 1,
    labelled: Callable[[str], Reporter] = lambda label: SilentReporter(),
    name: str | None = None,
) -> list[dict[str, Any]]:
    """Do every run that is not done yet, going on with those that were interrupted; returns all results."""
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"every run must be named once, got twice: {', '.join(twice)}")
    runs = [Job(variant.config, folder / variant.name) for variant in variants]
    for run in runs:
        if finished_result(run.config, run.folder) is None:
            check_model(run.config)
    made = train_several(runs, reporter=reporter, jobs=jobs, labelled=labelled)
    results = [result | {"variant": variant.label} for result, variant in zip(made, variants, strict=True)]
    if is_main_process():
        write_text(folder / (name or comparison_name(variants[0])), json.dumps(results, indent=2) + "\n")
    return results


def compare_at_best_rates(
    configs: Sequence[ExperimentConfig], rates: Sequence[float], folder: Path, **how: Any
) -> list[dict[str, Any]]:
    """Try every learning rate with the first seed, and do the other seeds with the one that is best on validation.

    Args:
        configs: One for every attention and seed.
        rates: Learning rates, the same for all attentions.
        folder: Where the runs are. `comparison-<task>-<preset>.json` has those of the chosen rates, and
            `comparison-<task>-<preset>-optimiser.learning_rate.json` all that were tried.
        **how: As for `compare`.

    Returns:
        The results at the chosen rates, in the order of the configurations.
    """
    if len(set(rates)) < len(rates) or min(rates) <= 0:
        raise ArgumentError(f"learning rates must be positive, each once, got {' '.join(map(str, rates))}")
    firsts = [config for config in configs if config.seed == configs[0].seed]
    tried = compare([_with_rate(config, rate) for config in firsts for rate in rates], folder, **how)
    chosen = {}
    for place, config in enumerate(firsts):
        results = tried[place * len(rates) : (place + 1) * len(rates)]
        chosen[attention_label(config)] = best_rate(dict(zip(rates, results, strict=True)))
    best = [_with_rate(config, chosen[attention_label(config)]) for config in configs]
    return compare(best, folder, **how, name=comparison_name(Variant(configs[0])))


def _with_rate(config: ExperimentConfig, rate: float) -> Variant:
    return Variant(at_rate(config, rate), f"{FIELD}={rate:g}")


def check_model(config: ExperimentConfig) -> None:
    """Build a model without its memory: what is impossible is to be seen before the first run, not at its own."""
    with torch.device("meta"):
        build_model(config, config.make_task())


def comparison_table(results: Sequence[dict[str, Any]]) -> Table:
    """Tabulate results: one row an attention, averaged over its seeds."""
    first = results[0]
    metric = selecting_metric(first)
    together, _ = combined_score(metric.name, first["test"])
    lines = []
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        label = f"{result['attention']} {result.get('variant', '')}".strip()
        groups.setdefault(label, []).append(result)
    values = {label: [run["test"][metric.name] for run in runs] for label, runs in groups.items()}
    for label in sorted(groups, key=lambda label: -metric.rank(statistics.mean(values[label]))):
        runs, scores = groups[label], values[label]
        spread = statistics.stdev(scores) if len(runs) > 1 else runs[0]["test"][f"{metric.name}_std"]
        combined = statistics.mean(combined_score(metric.name, run["test"])[1] for run in runs)
        mean = {
            field: statistics.mean(run[field] for run in runs)
            for field in ("best_step", "tokens_per_second", "train_seconds", "peak_memory_bytes")
        }
        score = statistics.mean(scores)
        lines.append(
            {
                "attention": label,
                "seeds": len(runs),
                metric.name: Cell(metric.show(score), score),
                "+-": Cell(metric.show_spread(spread), spread),
                together: Cell(metric.show(combined), combined),
                "best at step": round(mean["best_step"]),
                "tokens/s": number(mean["tokens_per_second"], "{:,.0f}"),
                "train time": number(mean["train_seconds"], "{:.0f} s"),
                "peak memory": number(mean["peak_memory_bytes"] / MEBIBYTE, "{:,.0f} MiB"),
            }
        )
    title = f"{first['task']}, preset {first['preset']}: {metric.name} on the test set, best first"
    note = f"{first['protocol']}. Deviations are over seeds; with one seed, over draws of the frequencies."
    return Table.of(lines, title, notes=[note])
