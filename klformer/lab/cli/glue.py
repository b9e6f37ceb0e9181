"""`klformer glue`: the tasks of GLUE for pretrained runs, or from scratch, and one table beside the paper's."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.lab.cli.command import plain_command
from klformer.lab.runs.config import preset
from klformer.lab.runs.glue import RESULTS, Plan, Start, Train, cell_values, check_pretrained, paper_values, run_glue
from klformer.lab.runs.glue import Cell as GlueCell
from klformer.lab.runs.jobs import Job, train_several
from klformer.lab.runs.naming import run_name
from klformer.lab.tables import Cell, Table, number, words
from klformer.lab.tasks.glue import GLUE_TASKS, LEARNING_RATES
from klformer.lab.terminal import make_console
from klformer.lab.training.processes import is_main_process
from klformer.lab.training.progress import labelled_reporters, make_reporter
from klformer.models import AttentionSpec

#: FastFood with all diagonals learned, one, or none.
ABLATION = tuple(f"fastfood-rks:learn={learn}" for learn in ("none", "s", "sgb"))


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


def run(options: Glue) -> None:
    """Do the runs that are not done, and print the table."""
    plan = Plan(
        preset=options.preset,
        tasks=options.tasks,
        learning_rates=options.learning_rates or LEARNING_RATES[options.preset],
        seeds=options.seeds,
        root=None if options.data_root is None else options.data_root.expanduser().absolute(),
        max_steps=options.max_steps,
    )
    attentions = (*options.attentions, *(ABLATION if options.ablation else ()))
    if options.corpus is not None and not attentions:
        raise ArgumentError("--corpus is what attentions are pretrained on; give --attentions or --ablation")
    if options.pretrain_steps is not None:
        check_count("pretrain_steps", options.pretrain_steps)
    if options.pretrain_steps is not None and options.corpus is None:
        raise ArgumentError("--pretrain-steps is for pretraining on a corpus; give --corpus")
    check_count("jobs", options.jobs)
    out, reporter = options.out.expanduser(), make_reporter(quiet=options.quiet)
    for folder in options.init_from:
        check_pretrained(folder.expanduser())
    starts = [Start.from_run(folder.expanduser()) for folder in options.init_from]
    train: Train = partial(
        train_several, reporter=reporter, jobs=options.jobs, labelled=labelled_reporters(quiet=options.quiet)
    )
    if options.corpus is None:
        starts += [Start.from_scratch(text) for text in attentions]
    elif attentions:
        runs = [_pretraining(text, options.corpus, options, out) for text in attentions]
        train(runs)
        starts += [Start.from_run(run.folder) for run in runs]
    rows = run_glue(plan, starts, out / "glue", train=train)
    if is_main_process():
        console = make_console(160)
        _table(rows, plan).print(console)
        console.print(f"runs and {RESULTS} are in {out / 'glue'}", highlight=False)


def _pretraining(text: str, corpus: Path, options: Glue, out: Path) -> Job:
    """The pretraining of an attention."""
    config = preset(options.preset, "corpus", AttentionSpec.parse(text))
    data = config.data.model_copy(update={"root": corpus}).absolute()
    training = config.training
    if options.pretrain_steps is not None:
        training = training.model_copy(update={"max_steps": options.pretrain_steps})
    config = config.model_copy(update={"data": data, "training": training, "objective": "masked"})
    return Job(config, out / run_name(config))


def _table(rows: Sequence[Mapping[str, Any]], plan: Plan) -> Table:
    cells = [cell for cell in cell_values(rows[0]) if cell[0] in plan.tasks]
    lines: list[dict[str, Cell]] = []
    for row in rows:
        values, paper = cell_values(row), paper_values(row)
        lines.append({"model": words(row["model"])} | {_heading(cell): _mean(values[cell]) for cell in cells})
        if paper:
            name = replace(words(f"  paper, {row['attention']}"), source="paper")
            lines.append({"model": name} | {_heading(cell): number(paper.get(cell), "{:.3g}") for cell in cells})
    seeds = f"{len(plan.seeds)} seed{'s' * (len(plan.seeds) > 1)}"
    note = f"Mean over {seeds}, and its deviation. The paper's rows are its own, of larger models."
    title = f"GLUE, preset {plan.preset}: GLUE's dev sets, learning rate by a part of train that is held out"
    return Table.of(lines, title, notes=[note])


def _heading(cell: GlueCell) -> str:
    task, metric, part = cell
    return f"{task} {'' if part == 'test' else part + ' '}{metric}"


def _mean(values: Sequence[float]) -> Cell:
    mean = statistics.mean(values)
    deviation = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return Cell(f"{mean:.3f}{deviation}", mean)


COMMAND = plain_command(Glue, run)
