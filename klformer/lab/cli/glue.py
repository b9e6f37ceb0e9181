"""`klformer glue`: the tasks of GLUE for pretrained runs, or from scratch, and one table beside the paper's.

Every task is trained with some learning rates and the first seed. The rate that is best on validation is chosen, the
other seeds are trained with it, and the mean on test is reported. What is done is not done again, and interrupted runs
go on.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from klformer.checks import check_count
from klformer.errors import ArgumentError, RunError
from klformer.files import write_json
from klformer.lab.cli.command import plain_command
from klformer.lab.environment import describe_environment
from klformer.lab.report.paper_numbers import GLUE_CELLS, GlueCell, glue_row
from klformer.lab.runs.config import ExperimentConfig, preset
from klformer.lab.runs.folder import RunFolder, what_it_took
from klformer.lab.runs.init_from import settings_to_start_from
from klformer.lab.runs.jobs import Job, train_several
from klformer.lab.runs.naming import attention_label, run_name, setting_and_start
from klformer.lab.runs.rates import best_rate, on_validation
from klformer.lab.tables import Cell, Table, number, words
from klformer.lab.tasks.glue import GLUE_TASKS, LEARNING_RATES
from klformer.lab.terminal import make_console
from klformer.lab.training.processes import is_main_process
from klformer.lab.training.progress import labelled_reporters, make_reporter
from klformer.models import AttentionSpec

#: FastFood with all diagonals learned, one, or none.
ABLATION = tuple(f"fastfood-rks:learn={learn}" for learn in ("none", "s", "sgb"))
#: What the paper's table does not have.
MORE_CELLS: tuple[GlueCell, ...] = (("stsb", "pearson", "test"), ("stsb", "spearman", "test"))
RESULTS = "glue.json"
CAPTION = (
    "Tasks of GLUE, one row a run and metric, with the learning rate that is best on validation at the first seed."
)


@dataclass(frozen=True, kw_only=True)
class Glue:
    """Fine-tune models on the tasks of GLUE, and print one table beside the paper's.

    Models are pretrained runs (`--init-from`), attentions that are pretrained on a corpus first (`--attentions` with
    `--corpus`), or attentions from scratch (`--attentions` alone). Runs that are done are not done again, and
    interrupted ones go on. Examples:

      klformer glue --data-root glue_data --init-from runs/corpus-wikitext-2-masked-laptop-softmax-seed0
      klformer glue --data-root glue_data --attentions softmax fastfood-prf --corpus wikitext-2
      klformer glue --data-root glue_data --attentions softmax --tasks sst2 rte --seeds 0 1
      klformer glue --data-root glue_data --ablation --corpus wikitext-2
    """

    init_from: tuple[Path, ...] = ()
    """Pretrained runs."""
    attentions: tuple[str, ...] = ()
    """Attentions, each with options after a colon."""
    ablation: bool = False
    """The paper's ablation: FastFood with nothing learned, with S, and with S, G and B."""
    corpus: Path | None = None
    """Pretrain the attentions on this corpus first, with the same preset."""
    data_root: Path | None = None
    """Folder of GLUE's tree."""
    tasks: tuple[str, ...] = tuple(GLUE_TASKS)
    """Tasks."""
    preset: Literal["paper", "laptop"] = "laptop"
    """Preset of pretraining and fine-tuning."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates, of which the best on validation is taken. Default: the paper's five, or three for a laptop."""
    seeds: tuple[int, ...] = (0,)
    """One run of every task for each. The first is run with every learning rate, the others with the one it chose."""
    jobs: int = 1
    """Trainings side by side, each in a process of its own with one thread."""
    max_steps: int | None = None
    """Steps of a fine-tuning run, if not those of the preset."""
    pretrain_steps: int | None = None
    """Steps of pretraining on --corpus, if not those of the preset."""
    out: Path = Path("runs")
    """Folder for runs."""
    quiet: bool = False
    """Say nothing but errors; the table is still printed."""

    @property
    def rates(self) -> tuple[float, ...]:
        return self.learning_rates or LEARNING_RATES[self.preset]

    @property
    def all_attentions(self) -> tuple[str, ...]:
        return (*self.attentions, *(ABLATION if self.ablation else ()))

    def check(self) -> None:
        """Refuse options that do not go together, before anything is trained."""
        for name, values in (("tasks", self.tasks), ("learning_rates", self.rates), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ArgumentError(f"{name} must be given, each once, got {' '.join(map(str, values)) or 'none'}")
        if unknown := [task for task in self.tasks if task not in GLUE_TASKS]:
            raise ArgumentError(f"tasks must be of {', '.join(GLUE_TASKS)}, got {', '.join(unknown)}")
        if self.corpus is not None and not self.all_attentions:
            raise ArgumentError("--corpus is what attentions are pretrained on; give --attentions or --ablation")
        if self.pretrain_steps is not None:
            check_count("pretrain_steps", self.pretrain_steps)
            if self.corpus is None:
                raise ArgumentError("--pretrain-steps is for pretraining on a corpus; give --corpus")
        check_count("jobs", self.jobs)


@dataclass(frozen=True, eq=False)
class Start:
    """A model that is fine-tuned: its name in tables and folders, its attention, and the pretrained run, if any."""

    name: str
    attention: AttentionSpec
    run: Path | None = None


class Which(NamedTuple):
    """One run."""

    start: Start
    task: str
    rate: float
    seed: int


def run_glue(options: Glue) -> None:
    """Do the runs that are not done, and print the table."""
    options.check()
    out = options.out.expanduser()
    reporter, labelled = make_reporter(quiet=options.quiet), labelled_reporters(quiet=options.quiet)
    train = partial(train_several, reporter=reporter, jobs=options.jobs, labelled=labelled)
    starts = [_pretrained(folder.expanduser()) for folder in options.init_from]
    if options.corpus is None:
        specs = map(AttentionSpec.parse, options.all_attentions)
        starts += [Start(f"{spec.label()}, from scratch", spec) for spec in specs]
    elif options.all_attentions:
        runs = [_pretraining(text, options.corpus, options, out) for text in options.all_attentions]
        train(runs)
        starts += [_pretrained(run.folder) for run in runs]
    names = [start.name for start in starts]
    if not starts or len(set(names)) < len(names):
        raise ArgumentError(f"give models, each once, got {'; '.join(names) or 'none'}")

    def results_of(wanted: Sequence[Which]) -> dict[Which, dict[str, Any]]:
        jobs = [Job(_config(options, which), _folder(out / "glue", which)) for which in wanted]
        return dict(zip(wanted, train(jobs), strict=True))

    first, *others = options.seeds
    pairs = [(start, task) for start in starts for task in options.tasks]
    tried = results_of([Which(*pair, rate, first) for pair in pairs for rate in options.rates])
    chosen = {pair: best_rate({rate: tried[Which(*pair, rate, first)] for rate in options.rates}) for pair in pairs}
    done = tried | results_of([Which(*pair, rate, seed) for pair, rate in chosen.items() for seed in others])
    models, rows = _summary(options, starts, chosen, done)
    if not is_main_process():
        return
    settings = {"preset": options.preset, "seeds": list(options.seeds), "learning_rates": list(options.rates)}
    report = {"caption": CAPTION, "environment": describe_environment(), "settings": settings}
    write_json(out / "glue" / RESULTS, {**report, "rows": rows, "models": models})
    console = make_console(160)
    _table(models, options).print(console)
    console.print(f"runs and {RESULTS} are in {out / 'glue'}", highlight=False)


def _pretrained(folder: Path) -> Start:
    """Return a model that starts from a run, which must be finished."""
    if RunFolder(folder).result() is None:
        raise RunError(f"{folder} is not finished; `klformer pretrain --name {folder.name} --resume` goes on with it")
    return Start(f"{folder.name}, fine-tuned", RunFolder(folder).config().attention, folder.absolute())


def _pretraining(text: str, corpus: Path, options: Glue, out: Path) -> Job:
    changes: dict[str, dict[str, Any]] = {"data": {"root": corpus.expanduser().absolute()}}
    if options.pretrain_steps is not None:
        changes["training"] = {"max_steps": options.pretrain_steps}
    config = preset(options.preset, "corpus", AttentionSpec.parse(text), changes, objective="masked")
    return Job(config, out / run_name(config))


def _config(options: Glue, which: Which) -> ExperimentConfig:
    changes: dict[str, Mapping[str, Any]] = {}
    if which.start.run is not None:
        changes |= settings_to_start_from(RunFolder(which.start.run).config(), options.preset, which.task)
    root = None if options.data_root is None else options.data_root.expanduser().absolute()
    changes["data"] = {**changes.get("data", {}), "root": root}
    changes["optimiser"] = {"learning_rate": which.rate}
    changes["training"] = {} if options.max_steps is None else {"max_steps": options.max_steps}
    attention, start = which.start.attention, which.start.run
    return preset(options.preset, which.task, attention, changes, seed=which.seed, init_from=start)


def _folder(folder: Path, which: Which) -> Path:
    name = re.sub(r"[^\w.=-]", "-", which.start.name)
    return folder / name / f"{which.task}-lr{which.rate:g}-seed{which.seed}"


def _summary(
    options: Glue,
    starts: Sequence[Start],
    chosen: Mapping[tuple[Start, str], float],
    done: Mapping[Which, Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return an entry for each model with the values of all its tasks, and a row for each run and number."""
    models, rows = [], []
    for start in starts:
        tasks: dict[str, Any] = {}
        for task in options.tasks:
            rate = chosen[start, task]
            runs = {seed: done[Which(start, task, rate, seed)] for seed in options.seeds}
            values = {_key(cell): [run[cell[2]][cell[1]] for run in runs.values()] for cell in _cells(task)}
            tried = {rate: done[Which(start, task, rate, options.seeds[0])] for rate in options.rates}
            validation = {f"{rate:g}": on_validation(result) for rate, result in tried.items()}
            tasks[task] = {"learning_rate": rate, "validation": validation, **values}
            for seed, result in runs.items():
                config = _config(options, Which(start, task, rate, seed))
                rows += [_run_row(config, cell, result) for cell in _cells(task)]
        paper = {_key(cell): value for cell, value in glue_row(start.attention.name, start.attention.options).items()}
        models.append({"model": start.name, "attention": start.attention.name, "tasks": tasks, "paper": paper})
    return models, rows


def _run_row(config: ExperimentConfig, cell: GlueCell, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return one number of one run, and what it depends on."""
    _, metric, part = cell
    return {
        "setting": f"{setting_and_start(config)}: {'' if part == 'test' else part + ' '}{metric}, %",
        "attention": attention_label(config),
        "seed": result["seed"],
        "value": 100 * result[part][metric],
        "learning_rate": config.optimiser.learning_rate,
        "test_examples": result[part]["num_examples"],
        "draws": result[part]["draws"],
        **what_it_took(result),
    }


def _cells(task: str) -> list[GlueCell]:
    return [cell for cell in (*GLUE_CELLS, *MORE_CELLS) if cell[0] == task]


def _key(cell: GlueCell) -> str:
    """Return a cell's name in JSON."""
    return "/".join(cell)


def _table(models: Sequence[Mapping[str, Any]], options: Glue) -> Table:
    cells = [cell for task in options.tasks for cell in _cells(task)]
    lines: list[dict[str, Cell]] = []
    for model in models:
        values = {_heading(cell): _mean(model["tasks"][cell[0]][_key(cell)]) for cell in cells}
        lines.append({"model": words(model["model"])} | values)
        if paper := model["paper"]:
            name = replace(words(f"  paper, {model['attention']}"), source="paper")
            lines.append({"model": name} | {_heading(cell): number(paper.get(_key(cell)), "{:.3g}") for cell in cells})
    seeds = f"{len(options.seeds)} seed{'s' * (len(options.seeds) > 1)}"
    note = f"Mean over {seeds}, and its deviation. The paper's rows are its own, of larger models."
    title = f"GLUE, preset {options.preset}: GLUE's dev sets, learning rate by a part of train that is held out"
    return Table.of(lines, title, notes=[note])


def _heading(cell: GlueCell) -> str:
    task, metric, part = cell
    return f"{task} {'' if part == 'test' else part + ' '}{metric}"


def _mean(values: Sequence[float]) -> Cell:
    mean = statistics.mean(values)
    deviation = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return Cell(f"{mean:.3f}{deviation}", mean)


COMMAND = plain_command(Glue, run_glue)
