"""All tasks of GLUE for some models: fine-tuned from pretrained runs, or from scratch, one table at the end.

Every task is trained with some learning rates and seeds. The rate with the best mean of the selecting metric on
validation is chosen, and its mean on test is reported. What is done is not done again, and interrupted runs go on.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klformer.errors import ArgumentError, RunError
from klformer.files import write_json
from klformer.models import AttentionSpec
from klformer.runs.config import ExperimentConfig
from klformer.runs.folder import RunFolder
from klformer.runs.glue_numbers import CELLS, MORE_CELLS, Cell, paper_row
from klformer.runs.init_from import SAME
from klformer.runs.presets import preset, usual_options
from klformer.runs.train import finished_result, train_run
from klformer.tasks import TASKS
from klformer.tasks.glue import GLUE_TASKS
from klformer.training.progress import Reporter

RESULTS = "glue.json"


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
        """A pretrained run.

        Raises:
            RunError: the folder is not a run's.
        """
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
        seeds: One run of every task and learning rate for each.
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

    def configs(self, start: Start, task: str) -> Iterator[ExperimentConfig]:
        """The runs of one model on one task."""
        for rate in self.learning_rates:
            for seed in self.seeds:
                yield self._config(start, task, rate, seed)

    def _config(self, start: Start, task: str, rate: float, seed: int) -> ExperimentConfig:
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
        optimiser = config.optimiser.model_copy(update={"learning_rate": rate})
        sections = {"data": data, "model": model, "training": training, "optimiser": optimiser}
        return config.model_copy(update={**sections, "seed": seed, "init_from": start.run})


def run_glue(plan: Plan, starts: Sequence[Start], folder: Path, *, reporter: Reporter) -> list[dict[str, Any]]:
    """Do every run that is not done yet; returns the rows of the table, which are in `glue.json` as well.

    Raises:
        ArgumentError: two models have the same name.
        RunError: a pretrained run does not fit.
    """
    names = [start.name for start in starts]
    if not starts or len(set(names)) < len(names):
        raise ArgumentError(f"give models, each once, got {'; '.join(names) or 'none'}")
    rows = []
    for start in starts:
        row: dict[str, Any] = {"model": start.name, "attention": start.attention.name, "tasks": {}}
        for task in plan.tasks:
            row["tasks"][task] = _best_rate(plan, start, task, folder, reporter)
        row["paper"] = {_key(cell): value for cell, value in _paper(start).items()}
        rows.append(row)
        # After every model: what was done so far is not to be lost.
        write_json(folder / RESULTS, {"preset": plan.preset, "seeds": list(plan.seeds), "rows": rows})
    return rows


def _best_rate(plan: Plan, start: Start, task: str, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """The results of a task with the learning rate that is best on validation."""
    results: dict[float, list[dict[str, Any]]] = {}
    for config in plan.configs(start, task):
        rate = config.optimiser.learning_rate
        name = f"{_plain(start.name)}/{task}-lr{rate:g}-seed{config.seed}"
        done = finished_result(config, folder / name)
        reporter.say(f"{name}{': done already' if done else ''}")
        results.setdefault(rate, []).append(done or train_run(config, folder / name, resume=True, reporter=reporter))
    metric = next(iter(results.values()))[0]["metric"]
    higher = next(iter(results.values()))[0]["metric_higher_is_better"]
    validation = {rate: statistics.mean(run["validation"][metric] for run in runs) for rate, runs in results.items()}
    best = max(validation, key=lambda rate: validation[rate] if higher else -validation[rate])
    cells = {
        _key(cell): [run[cell[2]][cell[1]] for run in results[best]]
        for cell in (*CELLS, *MORE_CELLS)
        if cell[0] == task
    }
    return {"learning_rate": best, "validation": {f"{rate:g}": value for rate, value in validation.items()}, **cells}


def _paper(start: Start) -> dict[Cell, float]:
    return paper_row(start.attention.name, start.attention.options)


def _key(cell: Cell) -> str:
    """A cell's name in JSON."""
    return "/".join(cell)


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in name)


def cell_values(row: Mapping[str, Any]) -> dict[Cell, list[float]]:
    """The values of all seeds by cell, of those tasks that were run."""
    return {cell: row["tasks"][cell[0]][_key(cell)] for cell in (*CELLS, *MORE_CELLS) if cell[0] in row["tasks"]}


def paper_values(row: Mapping[str, Any]) -> dict[Cell, float]:
    """The paper's values by cell."""
    return {cell: row["paper"][_key(cell)] for cell in CELLS if _key(cell) in row["paper"]}


def check_pretrained(folder: Path) -> None:
    """Raises RunError unless a run is there and finished."""
    if RunFolder(folder).result() is None:
        raise RunError(f"{folder} is not finished; `klformer pretrain --name {folder.name} --resume` goes on with it")
