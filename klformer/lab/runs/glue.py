"""All tasks of GLUE for some models: fine-tuned from pretrained runs, or from scratch, one table at the end.

Every task is trained with some learning rates and the first seed. The rate that is best on validation is chosen, the
other seeds are trained with it, and the mean on test is reported. What is done is not done again, and interrupted runs
go on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError, RunError
from klformer.files import write_json
from klformer.lab.environment import describe_environment
from klformer.lab.runs.config import ExperimentConfig, preset, usual_options
from klformer.lab.runs.facts import what_it_took
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.init_from import SAME
from klformer.lab.runs.jobs import Job
from klformer.lab.runs.naming import attention_label, setting_and_start
from klformer.lab.runs.rates import at_rate, best_rate, on_validation
from klformer.lab.tasks import TASKS
from klformer.lab.tasks.glue import GLUE_TASKS
from klformer.lab.training.processes import is_main_process
from klformer.models import AttentionSpec

#: A cell of a table: the task, the metric, and the part of the result.
Cell = tuple[str, str, str]
CELLS: tuple[Cell, ...] = (
    ("sst2", "accuracy", "test"),
    ("mrpc", "accuracy", "test"),
    ("mrpc", "f1", "test"),
    ("qqp", "accuracy", "test"),
    ("qqp", "f1", "test"),
    ("mnli", "accuracy", "test"),
    ("mnli", "accuracy", "mismatched"),
    ("qnli", "accuracy", "test"),
    ("wnli", "accuracy", "test"),
    ("rte", "accuracy", "test"),
    ("cola", "matthews", "test"),
)
#: Ours alone.
MORE_CELLS: tuple[Cell, ...] = (("stsb", "pearson", "test"), ("stsb", "spearman", "test"))

#: "Results on the GLUE benchmark after fine-tuning on respective tasks", in the order of CELLS.
GLUE: Mapping[str, tuple[float, ...]] = {
    "softmax": (0.81, 0.70, 0.82, 0.83, 0.76, 0.64, 0.64, 0.68, 0.56, 0.60, 0.18),
    "fastfood-rks": (0.83, 0.71, 0.82, 0.81, 0.74, 0.57, 0.57, 0.64, 0.59, 0.56, 0.13),
    "gmm-rks": (0.80, 0.70, 0.82, 0.77, 0.69, 0.47, 0.48, 0.60, 0.61, 0.57, 0.07),
    "generative-rks": (0.81, 0.70, 0.82, 0.81, 0.73, 0.59, 0.58, 0.63, 0.62, 0.58, 0.16),
    "fastfood-prf": (0.81, 0.71, 0.82, 0.81, 0.74, 0.56, 0.57, 0.64, 0.59, 0.58, 0.12),
    "generative-prf": (0.80, 0.71, 0.82, 0.80, 0.74, 0.56, 0.56, 0.61, 0.60, 0.55, 0.10),
    "gmm-prf": (0.82, 0.71, 0.82, 0.81, 0.74, 0.56, 0.56, 0.64, 0.59, 0.59, 0.21),
}
#: "Ablation studies using FastFood variants on the GLUE benchmark", by what is learned; the paper's is FastFood-RKS.
_FASTFOOD = {
    "none": (0.814, 0.713, 0.820, 0.811, 0.738, 0.571, 0.568, 0.629, 0.634, 0.563, 0.152),
    "s": (0.807, 0.706, 0.822, 0.810, 0.741, 0.571, 0.571, 0.642, 0.606, 0.570, 0.101),
    "sgb": (0.828, 0.707, 0.820, 0.810, 0.739, 0.569, 0.572, 0.638, 0.592, 0.563, 0.129),
}


def paper_row(attention: str, options: Mapping[str, object]) -> dict[Cell, float]:
    """The paper's numbers for an attention; nothing if it has none."""
    row = GLUE.get(attention)
    if attention == "fastfood-rks":
        row = _FASTFOOD.get(str(options.get("learn", "sgb")), row)
    return {} if row is None else dict(zip(CELLS, row, strict=True))


RESULTS = "glue.json"
CAPTION = (
    "Tasks of GLUE, one row a run and metric, with the learning rate that is best on validation at the first seed."
)


@dataclass(frozen=True)
class Start:
    """A model that is fine-tuned.

    Args:
        name: In tables and folders.
        attention: Its attention.
        run: The pretrained run; None to start from scratch.
    """

    name: str
    attention: AttentionSpec
    run: Path | None = None

    @staticmethod
    def from_run(folder: Path) -> "Start":
        """A pretrained run."""
        config = RunFolder(folder).config()
        return Start(f"{folder.name}, fine-tuned", config.attention, folder.expanduser().absolute())

    @staticmethod
    def from_scratch(text: str) -> "Start":
        """An attention, with options after a colon."""
        attention = AttentionSpec.parse(text)
        return Start(f"{attention.label()}, from scratch", attention)


@dataclass(frozen=True)
class Plan:
    """What is run.

    Args:
        preset: Of all tasks.
        tasks: Their names.
        learning_rates: Those that are tried.
        seeds: One run of every task for each; the first chooses the learning rate.
        root: GLUE's tree.
        max_steps: Steps of a run, if not those of the preset.
    """

    preset: str
    tasks: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    root: Path | None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        for name, values in (("tasks", self.tasks), ("learning_rates", self.learning_rates), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ArgumentError(f"{name} must be given, each once, got {' '.join(map(str, values)) or 'none'}")
        if unknown := [task for task in self.tasks if task not in GLUE_TASKS]:
            raise ArgumentError(f"tasks must be of {', '.join(GLUE_TASKS)}, got {', '.join(unknown)}")

    def config(self, start: Start, task: str, rate: float, seed: int) -> ExperimentConfig:
        """One run of one model on one task."""
        options = usual_options(self.preset, task, start.attention.name) | start.attention.options
        config = preset(self.preset, task, AttentionSpec(name=start.attention.name, options=options))
        data = config.data.model_copy(update={"root": self.root}).absolute()
        model, training = config.model, config.training
        if start.run is not None:
            source = RunFolder(start.run).config()
            model = model.model_copy(update={name: getattr(source.model, name) for name in SAME})
            longest = source.data.max_len or TASKS[source.task].default_max_len
            data = data.model_copy(update={"max_len": min(longest, data.max_len or longest)})
        if self.max_steps is not None:
            training = training.model_copy(update={"max_steps": self.max_steps})
        sections = {"data": data, "model": model, "training": training}
        return at_rate(config.model_copy(update={**sections, "seed": seed, "init_from": start.run}), rate)


#: Does runs and gives their results.
Train = Callable[[Sequence[Job]], list[dict[str, Any]]]


def run_glue(plan: Plan, starts: Sequence[Start], folder: Path, *, train: Train) -> list[dict[str, Any]]:
    """Do every run that is not done yet; returns one row a model, and writes them to `glue.json`."""
    names = [start.name for start in starts]
    if not starts or len(set(names)) < len(names):
        raise ArgumentError(f"give models, each once, got {'; '.join(names) or 'none'}")
    results_of = partial(_results, plan, starts, folder, train)
    first, *others = plan.seeds
    pairs = [(number, task) for number in range(len(starts)) for task in plan.tasks]
    tried = results_of([(*pair, rate, first) for pair in pairs for rate in plan.learning_rates])
    chosen = {pair: best_rate({rate: tried[*pair, rate, first] for rate in plan.learning_rates}) for pair in pairs}
    done = tried | results_of([(*pair, rate, seed) for pair, rate in chosen.items() for seed in others])
    models, rows = [], []
    for number, start in enumerate(starts):
        model: dict[str, Any] = {"model": start.name, "attention": start.attention.name, "tasks": {}}
        for task in plan.tasks:
            rate = chosen[number, task]
            results = [done[number, task, rate, seed] for seed in plan.seeds]
            validation = {f"{rate:g}": on_validation(tried[number, task, rate, first]) for rate in plan.learning_rates}
            values = {_key(cell): [run[cell[2]][cell[1]] for run in results] for cell in _cells(task)}
            model["tasks"][task] = {"learning_rate": rate, "validation": validation, **values}
            rows += [_run_row(plan, start, cell, rate, run) for run in results for cell in _cells(task)]
        model["paper"] = {_key(cell): value for cell, value in _paper(start).items()}
        models.append(model)
    settings = {"preset": plan.preset, "seeds": list(plan.seeds), "learning_rates": list(plan.learning_rates)}
    report = {"caption": CAPTION, "environment": describe_environment(), "settings": settings}
    if is_main_process():
        write_json(folder / RESULTS, {**report, "rows": rows, "models": models})
    return models


#: A run by the number of its model, its task, learning rate and seed.
Which = tuple[int, str, float, int]


def _results(
    plan: Plan, starts: Sequence[Start], folder: Path, train: Train, wanted: Sequence[Which]
) -> dict[Which, dict[str, Any]]:
    runs = []
    for number, task, rate, seed in wanted:
        config = plan.config(starts[number], task, rate, seed)
        runs.append(Job(config, folder / _plain(starts[number].name) / f"{task}-lr{rate:g}-seed{seed}"))
    return dict(zip(wanted, train(runs), strict=True))


def _cells(task: str) -> list[Cell]:
    return [cell for cell in (*CELLS, *MORE_CELLS) if cell[0] == task]


def _run_row(plan: Plan, start: Start, cell: Cell, rate: float, result: Mapping[str, Any]) -> dict[str, Any]:
    """One number of one run, and what it depends on."""
    task, metric, part = cell
    config = plan.config(start, task, rate, result["seed"])
    return {
        "setting": f"{setting_and_start(config)}: {'' if part == 'test' else part + ' '}{metric}, %",
        "attention": attention_label(config),
        "seed": result["seed"],
        "value": 100 * result[part][metric],
        "learning_rate": rate,
        "test_examples": result[part]["num_examples"],
        "draws": result[part]["draws"],
        **what_it_took(result),
    }


def _paper(start: Start) -> dict[Cell, float]:
    return paper_row(start.attention.name, start.attention.options)


def _key(cell: Cell) -> str:
    """A cell's name in JSON."""
    return "/".join(cell)


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in name)


def cell_values(row: Mapping[str, Any]) -> dict[Cell, list[float]]:
    """The values of all seeds by cell, of those tasks that were run."""
    return {cell: row["tasks"][task][_key(cell)] for task in row["tasks"] for cell in _cells(task)}


def paper_values(row: Mapping[str, Any]) -> dict[Cell, float]:
    """The paper's values by cell."""
    return {cell: row["paper"][_key(cell)] for cell in CELLS if _key(cell) in row["paper"]}


def check_pretrained(folder: Path) -> None:
    """Raises RunError unless a run is there and finished."""
    if RunFolder(folder).result() is None:
        raise RunError(f"{folder} is not finished; `klformer pretrain --name {folder.name} --resume` goes on with it")
