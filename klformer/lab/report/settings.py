"""Runs that may be compared: those of one task with the same configuration but for attention and seed.

Where an attention was run with several learning rates, it is compared with the one that is best on validation, as
`klformer compare --learning-rates` chooses it. The others are kept beside, as what was tried.
"""

import json
import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from pydantic import BaseModel

from klformer.lab.report.paper_numbers import LRA, PAPER_TASKS
from klformer.lab.report.run import ACCURACY, Run
from klformer.lab.runs.config import preset_table
from klformer.lab.runs.folder import TaskFacts
from klformer.lab.runs.rates import FIELD as RATE
from klformer.lab.runs.rates import choice, rank_on_validation
from klformer.lab.tables import finite
from klformer.lab.tasks import TASKS, DataConfig
from klformer.lab.training.config import OptimiserConfig, ScheduleConfig, TrainingConfig
from klformer.lab.training.metrics import Metric
from klformer.models import ModelConfig


def describe_budget(config: Mapping[str, Any]) -> str:
    """Describe steps, batch, length and model, from a flat configuration; a length that is not set is the task's
    own."""

    def number(key: str) -> str:
        value = finite(config.get(key))
        return "?" if value is None else f"{value:,}"

    steps = finite(config.get("training.max_steps"))
    length = f"{steps:,} steps" if steps is not None else f"{number('training.max_epochs')} epochs"
    task = str(config.get("task"))
    usual = TASKS[task].default_max_len if task in TASKS else None
    tokens = finite(config.get("data.max_len")) or usual
    layers = "1 layer" if config.get("model.num_layers") == 1 else f"{number('model.num_layers')} layers"
    return (
        f"{length} of {number('training.batch_size')} sequences"
        + (f" of at most {tokens:,} tokens" if tokens is not None else "")
        + f", {layers} of width {number('model.model_dim')}"
    )


def paper_budget(task: str) -> str | None:
    """Return the paper's own budget for a task, from its table of hyper-parameters."""
    lengths = {"listops": 2000, "text": 4000, "retrieval": 4000, "image": 1024}
    if task not in lengths:
        return None
    table = preset_table("paper", task)
    flat = {f"{section}.{key}": value for section in ("model", "training") for key, value in table[section].items()}
    return describe_budget(flat | {"data.max_len": lengths[task]})


#: Sections of the configuration that must agree, and fields in them that change no result.
COMPARED: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "optimiser": OptimiserConfig,
    "schedule": ScheduleConfig,
    "training": TrainingConfig,
}
FREE = {
    "data.root",
    "data.train",
    "data.validation",
    "data.test",
    "data.text_column",
    "data.label_column",
    "training.checkpoint_every",
    "training.evaluation_batch_size",
    "training.evaluation_draws",
    "training.checkpoint_seconds",
    "training.keep_checkpoints",
    "training.keep_milestones",
    "training.log_every",
    "training.pad_to_longest",
}
#: What holds for a run that was written before a field existed, as it does where the run is loaded.
DEFAULTS = {
    f"{section}.{name}": field.get_default()
    for section, kind in COMPARED.items()
    for name, field in kind.model_fields.items()
    if not field.is_required()
}
#: Task, preset and configuration of a setting.
_Key = tuple[TaskFacts, str, str]
#: The order of the page: the paper's tasks, then that of sparsity; others follow by name.
TASK_ORDER = (*PAPER_TASKS, "sparsity")


@dataclass(frozen=True)
class Group:
    """The runs of one attention in a setting: seeds."""

    attention: str
    runs: tuple[Run, ...]
    metric: Metric

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.result is not None)

    @property
    def seeds(self) -> int:
        """Seeds of the finished runs; copies of a run, and runs that repeat a seed, have one."""
        return len({run.seed for run in self.finished})

    def test(self, name: str) -> float | None:
        """Return a number of the test set, averaged over the seeds that have it."""
        return _mean(self._by_seed(lambda run: run.result.test.get(name) if run.result is not None else None))

    def number(self, name: str) -> float | None:
        """Return a number of result.json, averaged over the seeds that have it."""
        return _mean(self._by_seed(lambda run: run.result.numbers.get(name) if run.result is not None else None))

    def score(self) -> float | None:
        """Return the metric on the test set, scaled."""
        value = self.test(self.metric.name)
        return None if value is None else self.metric.scaled(value)

    def spread(self) -> tuple[float, str] | None:
        """Return the deviation of the metric on the test set, scaled, and over what: seeds, or draws of one seed."""
        name, scaled = self.metric.name, self.metric.scaled
        known = self._by_seed(lambda run: run.result.test.get(name) if run.result is not None else None)
        if len(known) > 1:
            return scaled(stdev(known)), f"{len(known)} seeds"
        draws, deviation = self.test("draws"), self.test(f"{name}_std")
        if draws is None or draws < 2 or deviation is None:
            return None
        return scaled(deviation), f"{draws:.0f} draws"

    def standard_error(self) -> float:
        """Return the standard error of the metric on the test set, scaled: over seeds, or that of a share of so many
        examples if it is larger; 0 if unknown."""
        spread, size, share = self.spread(), self.test("num_examples"), self.test(self.metric.name)
        over_seeds = 0.0 if spread is None or self.seeds < 2 else spread[0] / math.sqrt(self.seeds)
        if not size or share is None or not self.metric.percent or not 0 <= share <= 1:
            return over_seeds
        return max(over_seeds, self.metric.scaled(math.sqrt(share * (1 - share) / size)))

    def validation(self) -> float | None:
        """Return the metric on the validation set with the weights that were tested, scaled and averaged over seeds."""
        value = _mean(self._by_seed(_on_validation))
        return None if value is None else self.metric.scaled(value)

    def best_validation(self) -> float | None:
        """Return the best validation so far, scaled and averaged over seeds; there for unfinished runs, too."""
        return _mean(
            self._by_seed(lambda run: self.metric.best([value for _, value in run.curve]) if run.curve else None)
        )

    def speed(self) -> float | None:
        return _mean(self._by_seed(lambda run: run.speed))

    def _by_seed(self, value: Callable[[Run], float | None]) -> list[float]:
        """Return a value for every seed that has it, averaged over runs that repeat the seed."""
        by_seed: dict[int, list[float]] = {}
        for run in self.runs:
            if (known := value(run)) is not None:
                by_seed.setdefault(run.seed, []).append(known)
        return [fmean(values) for values in by_seed.values()]


@dataclass(frozen=True)
class Setting:
    """One task with one configuration; its attentions can be compared, those of two settings can't."""

    letter: str
    task: TaskFacts
    preset: str
    groups: tuple[Group, ...]
    #: The fields, with their values, in which the settings of this task differ.
    difference: tuple[str, ...] = ()
    #: Attentions with all learning rates that were tried, the chosen one among them; none where there was no choice.
    tried: tuple[Group, ...] = ()
    #: What the learning rate is, in words, if it was chosen.
    rate: str = ""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def all_runs(self) -> tuple[Run, ...]:
        """With those of learning rates that were tried and not chosen."""
        chosen = {run.title for run in self.runs}
        return (*self.runs, *(run for group in self.tried for run in group.runs if run.title not in chosen))

    @property
    def metric(self) -> Metric:
        return self.task.metric

    @property
    def chance(self) -> float | None:
        """The metric of always saying the commonest class of the test set, or what the task knows of it; scaled."""
        results = (run.result for run in self.runs if run.result is not None and self.metric == ACCURACY)
        counts = next(([sum(row) for row in result.confusion] for result in results if result.confusion), [])
        chance = max(counts) / sum(counts) if sum(counts) else self.task.chance
        return None if chance is None else self.metric.scaled(chance)

    @property
    def paper_task(self) -> str | None:
        """The task of the paper's tables whose figures stand beside those of this setting."""
        return self.task.name if self.task.name in PAPER_TASKS and self.metric == ACCURACY else None

    def group(self, attention: str) -> Group | None:
        return next((group for group in self.groups if group.attention == attention), None)

    def budget(self) -> str:
        return describe_budget(self.runs[0].config)

    def protocols(self) -> list[str]:
        return sorted({run.result.protocol for run in self.runs if run.result is not None and run.result.protocol})

    def ranked(self) -> list[tuple[Group, float]]:
        """Return finished attentions with their scores, best first."""
        scored = [(group, score) for group in self.groups if (score := group.score()) is not None]
        return sorted(scored, key=lambda item: -self.metric.rank(item[1]))

    def best(self) -> list[Group]:
        """Return the finished attentions that no other beats, as far as the page shows."""
        ranked = [(group, self.metric.show_scaled(score)) for group, score in self.ranked()]
        return [group for group, shown in ranked if shown == ranked[0][1]]

    def is_best(self, group: Group) -> bool:
        """Return whether it is one of the best of several, significantly: two standard errors from some other one."""
        ranked = self.ranked()
        top = [one for one, score in ranked if not _apart(ranked[0][0], one)]
        return len(top) < len(ranked) and any(group is one for one in top)

    def test_size(self) -> int | None:
        """Return examples of the test set, where all finished runs have the same."""
        sizes = {run.result.test.get("num_examples") for run in self.runs if run.result is not None}
        size = sizes.pop() if len(sizes) == 1 else None
        return None if size is None else int(size)


def _apart(first: Group, second: Group) -> bool:
    """Return whether two scores differ significantly, or at all where nothing is known of chance."""
    one, other = first.score(), second.score()
    if one is None or other is None:
        return True
    show = first.metric.show_scaled
    return show(one) != show(other) and abs(one - other) > 2 * math.hypot(
        first.standard_error(), second.standard_error()
    )


def task_order(name: str) -> int:
    """Return the place of a task on the page."""
    return TASK_ORDER.index(name) if name in TASK_ORDER else len(TASK_ORDER)


def make_settings(runs: Sequence[Run]) -> tuple[Setting, ...]:
    """Sort the runs into settings, with a letter each, in the order of the page."""
    by_key: dict[_Key, list[Run]] = {}
    tried: dict[_Key, list[Group]] = {}
    for of_model in _models(runs):
        finished = [(run.seed, learning_rate(run), _rank(run)) for run in of_model if run.result is not None]
        found = choice(finished)
        if found is None:
            for run in of_model:
                by_key.setdefault(_key(run, _essence(run)), []).append(run)
            continue
        chosen, rates = found
        essence = _essence(of_model[0]) | {RATE: f"best of {', '.join(f'{rate:g}' for rate in rates)}"}
        key = _key(of_model[0], essence)
        by_key.setdefault(key, []).extend(run for run in of_model if learning_rate(run) == chosen)
        for rate in sorted(set(map(learning_rate, of_model))):
            at_rate = tuple(run for run in of_model if learning_rate(run) == rate)
            tried.setdefault(key, []).append(Group(of_model[0].attention, at_rate, of_model[0].task.metric))

    def place(key: _Key) -> tuple[int, str, str, str, str, int, str]:
        task, preset, essence = key
        return (
            *(task_order(task.name), task.name, task.label, task.metric.name),
            *(preset, -len(by_key[key]), essence),
        )

    keys = sorted(by_key, key=place)
    settings = []
    for number, key in enumerate(keys):
        same_task = [other for other in keys if other[0] == key[0]]
        settings.append(
            Setting(
                letter=_letter(number),
                task=next((run.task for run in by_key[key] if run.task.classes), key[0]),
                preset=key[1],
                groups=_groups(by_key[key], key[0].metric),
                difference=_difference(json.loads(key[2]), [json.loads(other[2]) for other in same_task]),
                tried=tuple(sorted(tried.get(key, []), key=lambda group: attention_order(group.attention))),
                rate=json.loads(key[2])[RATE] if key in tried else "",
            )
        )
    return tuple(settings)


def count(number: int, what: str) -> str:
    """Write a number of things: one seed, two seeds."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def base_name(attention: str) -> str:
    """Return the name without options."""
    return attention.partition(":")[0]


def attention_order(attention: str) -> tuple[int, str]:
    """Return the paper's order of models; variants follow their model."""
    names = [row.attention for row in LRA]
    base = base_name(attention)
    return (names.index(base) if base in names else len(names), attention)


def _groups(runs: Sequence[Run], metric: Metric) -> tuple[Group, ...]:
    by_attention: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        by_attention.setdefault(run.attention, []).append(run)
    return tuple(Group(name, tuple(by_attention[name]), metric) for name in sorted(by_attention, key=attention_order))


def _models(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs that differ in learning rate and seed alone."""
    models: dict[tuple[str, _Key], list[Run]] = {}
    for run in runs:
        models.setdefault((run.attention, _key(run, _essence(run) | {RATE: None})), []).append(run)
    return list(models.values())


def _key(run: Run, essence: Mapping[str, Any]) -> _Key:
    # Runs of one task may be older than the names of its classes.
    return run.task.model_copy(update={"classes": ()}), run.preset, json.dumps(essence, sort_keys=True)


def learning_rate(run: Run) -> float:
    """Return the learning rate; 0 where a configuration has one that is no number."""
    return finite(_essence(run)[RATE]) or 0.0


def _rank(run: Run) -> float:
    return rank_on_validation(run.task.metric, _on_validation(run))


def _on_validation(run: Run) -> float | None:
    """Return the metric on the validation set, with the weights that were tested."""
    return None if run.result is None else run.result.validation.get(run.task.metric.name)


def _essence(run: Run) -> dict[str, Any]:
    complete = {**DEFAULTS, **run.config}
    return {key: value for key, value in complete.items() if key.split(".")[0] in COMPARED and key not in FREE}


def _difference(own: Mapping[str, Any], all_of_task: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    keys = sorted({key for essence in all_of_task for key in essence})
    return tuple(
        f"{key} = {json.dumps(own[key]) if key in own else 'not set'}"
        for key in keys
        if len({json.dumps(essence.get(key)) for essence in all_of_task}) > 1
    )


def _letter(number: int) -> str:
    letters = string.ascii_uppercase
    return letters[number] if number < len(letters) else _letter(number // len(letters) - 1) + letters[number % 26]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
