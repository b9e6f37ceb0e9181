"""The page itself: everything that was collected, put into the template with its style and script."""

import base64
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from statistics import fmean, geometric_mean
from tempfile import TemporaryDirectory

from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

import klformer
from klformer.errors import ArgumentError
from klformer.lab.report import paper_numbers
from klformer.lab.report.analysis_tables import eigenvalue_head_tables, eigenvalue_table, variance_table
from klformer.lab.report.collect import Collection
from klformer.lab.report.drawing import Artist, Drawing, is_drawn_here
from klformer.lab.report.efficiency import make_efficiency
from klformer.lab.report.figures import Bubble, draw_bubbles, draw_curves, draw_memory_by_task, draw_variance
from klformer.lab.report.paper_numbers import LRA, LRA_TASKS, PAPER_TASKS, task_title
from klformer.lab.report.run import ACCURACY
from klformer.lab.report.run_tables import confusion_table, glue_table, glue_task, lra_table, rates_table, setting_table
from klformer.lab.report.settings import (
    Group,
    Setting,
    attention_order,
    count,
    make_settings,
    paper_budget,
)
from klformer.lab.tables import Table
from klformer.lab.training.metrics import Metric

TEMPLATE = "template.html.j2"
#: Differences from other settings that a card has room for.
_ON_A_CARD = 2
#: Options without which a page would call home: nothing may be loaded, and only the page's own script may run.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; script-src '{}'"
)


@dataclass(frozen=True)
class Glance:
    """The first thing to read about a setting."""

    title: str
    letter: str
    budget: str
    best: str | None
    #: Others with the same score.
    ties: int
    #: The name of the metric; scores are texts with their unit.
    metric: str
    score: str
    spread: str
    softmax: str
    chance: str
    paper: str
    finished: int
    unfinished: int
    #: What sets it apart from other settings of its task, where that is short enough for a card.
    difference: tuple[str, ...]


@dataclass(frozen=True)
class SettingView:
    """A setting with its table and figures, the learning rates it was chosen from, and the classes that its best
    attention mixes up."""

    setting: Setting
    table: Table
    rates: Table | None
    drawings: tuple[Drawing, ...]
    confusion: Table | None


def write_report(collection: Collection, target: Path, *, title: str) -> list[Path]:
    """Write the page, and its figures as files beside it.

    Args:
        target: The page; figures go to a folder with its name and "-figures".

    Returns:
        What was written: the page first.

    Raises:
        ValueError: the page can't be written there; nothing is left behind.
    """
    if target.is_dir():
        raise ArgumentError(
            f"can't write {target}: it is a folder; name a file in it, such as {target / 'report.html'}"
        )
    folder = target.with_name(f"{target.stem}-figures")
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"can't write figures to {folder}: it is a file; move it, or give the page another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.stem}-") as name:
            room = Path(name)
            page, drawings = render(collection, room / "figures", title=title)
            (room / "page").write_text(page, encoding="utf-8")
            figures = _put_figures([room / "figures" / f"{drawing.name}.svg" for drawing in drawings], folder)
            os.replace(room / "page", target)
    except OSError as error:
        raise ArgumentError(f"can't write {target}: {error.strerror or error}") from error
    return [target, *figures]


def _put_figures(drawn: Sequence[Path], folder: Path) -> list[Path]:
    """Move figures to their folder, and remove those of an earlier page that this one does not have."""
    figures = [folder / path.name for path in drawn]
    try:
        if drawn:
            folder.mkdir(exist_ok=True)
        for path, figure in zip(drawn, figures, strict=True):
            shutil.move(path, figure)
        for path in folder.glob("*.svg"):
            if path not in figures and is_drawn_here(path):
                path.unlink()
    except OSError as error:
        raise ArgumentError(f"can't write figures to {folder}: {error.strerror or error}") from error
    return figures


def render(collection: Collection, folder: Path, *, title: str) -> tuple[str, list[Drawing]]:
    """Return the page as text, and the figures in it, which are written to `folder`."""
    settings = make_settings(collection.runs)
    artist = Artist(folder, _attentions(collection))
    views = [
        SettingView(
            setting=setting,
            table=setting_table(setting),
            rates=rates_table(setting),
            drawings=_drawings(artist, setting),
            confusion=confusion_table(setting),
        )
        for setting in settings
    ]
    title_of_average = "Average over ListOps, Text and Retrieval"
    average = draw_bubbles(artist, "bubbles-average", title_of_average, *_average_bubbles(settings), ACCURACY)
    memory = draw_memory_by_task(artist, settings)
    efficiency = make_efficiency(collection, artist)
    variance = _variance_drawings(artist, collection)
    source = resources.files("klformer.lab.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = _part(source, "script")
    page = environment.from_string(source).render(
        title=title,
        policy=Markup(POLICY.format(_digest(script))),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=klformer.__version__,
        collection=collection,
        settings=settings,
        glances=[glance(setting) for setting in settings],
        lra=lra_table(settings),
        paper_budgets=[(title, paper_budget(task)) for task, title in PAPER_TASKS.items()],
        views=views,
        average=average,
        memory=memory,
        efficiency=efficiency,
        variance=variance,
        variance_table=variance_table([row for analysis in collection.variance for row in analysis.rows]),
        eigenvalues=eigenvalue_table(collection.eigenvalues, collection.runs),
        eigenvalue_heads=eigenvalue_head_tables(collection.eigenvalues),
        eigenvalue_captions=list(dict.fromkeys(analysis.caption for analysis in collection.eigenvalues)),
        glue=glue_table(settings),
        has_glue=any(glue_task(setting.task.name) is not None for setting in settings),
        numbers=paper_numbers,
        unfinished=[run for run in collection.runs if run.result is None],
    )
    drawings = [drawing for view in views for drawing in view.drawings]
    drawings += [drawing for drawing in (average, memory) if drawing is not None]
    return page, [*drawings, *efficiency.drawings(), *variance]


def glance(setting: Setting) -> Glance:
    """Return what a reader should know about a setting first: the best attention, and what to hold it against."""
    ranked, metric = setting.ranked(), setting.metric
    softmax = setting.group("softmax")

    def brief(score: float | None) -> str:
        return "" if score is None else _briefly(metric, score)

    finished = sum(run.result is not None for run in setting.runs)
    return Glance(
        title=setting.task.label,
        letter=setting.letter,
        budget=setting.budget(),
        best=ranked[0][0].attention if ranked else None,
        ties=len(setting.best()[1:]),
        metric=metric.name,
        score=brief(ranked[0][1] if ranked else None),
        spread=_describe_spread(ranked[0][0]) if ranked else "",
        softmax=brief(softmax.score() if softmax is not None else None),
        chance=brief(setting.chance),
        paper=_best_of_paper(setting.paper_task) if setting.paper_task is not None else "",
        finished=finished,
        unfinished=len(setting.runs) - finished,
        difference=setting.difference if len(setting.difference) <= _ON_A_CARD else (),
    )


def _best_of_paper(task: str) -> str:
    """Return the paper's best model of a task, and its Transformer."""
    accuracies = {row.model: accuracy for row in LRA if (accuracy := row.accuracy(task)) is not None}
    best = max(accuracies, key=lambda model: accuracies[model])
    transformer = LRA[0].model
    return f"{best} {accuracies[best]:.2f}%, {transformer} {accuracies[transformer]:.2f}%"


def _briefly(metric: Metric, scaled: float) -> str:
    """Write a scaled value in a sentence, with its unit."""
    return f"{scaled:.1f}%" if metric.percent else f"{scaled:.3g}"


def _describe_spread(group: Group) -> str:
    spread, runs = group.spread(), len(group.finished)
    parts = [] if spread is None else [f"± {group.metric.show_scaled(spread[0])} over {spread[1]}"]
    if runs != group.seeds:
        parts.append(count(runs, "run"))
    if spread is None or "draws" in spread[1]:
        parts.append(count(group.seeds, "seed"))
    return ", ".join(parts)


def _attentions(collection: Collection) -> list[str]:
    """Return all attentions of the page; those of runs come first and get the colours that are easiest to tell
    apart."""
    trained = {run.attention for run in collection.runs}
    others = {str(row["attention"]) for analysis in collection.variance for row in analysis.rows}
    others |= {
        str(row["name"]) for benchmark in collection.benchmarks_of("attention") for row in benchmark.rows("results")
    }
    for models in collection.benchmarks_of("model"):
        others |= {str(row["attention"]) for row in (*models.rows("speed"), *models.rows("length"))}
    return [*sorted(trained, key=attention_order), *sorted(others - trained, key=attention_order)]


def _drawings(artist: Artist, setting: Setting) -> tuple[Drawing, ...]:
    bubbles, reference = _bubbles(setting)
    name = setting.metric.name
    title = f"{name[:1].upper()}{name[1:]}, memory and speed"
    found = (
        draw_curves(artist, setting),
        draw_bubbles(artist, f"bubbles-{setting.letter}", title, bubbles, reference, setting.metric),
    )
    return tuple(drawing for drawing in found if drawing is not None)


def _bubbles(setting: Setting) -> tuple[list[Bubble], str]:
    """Return attentions with all three figures; speed is relative to softmax, or to the slowest without it."""
    whole = []
    for group in setting.groups:
        score, memory, speed = group.score(), group.number("peak_memory_bytes"), group.speed()
        if score is not None and memory is not None and speed:
            whole.append(Bubble(group.attention, score, memory, speed))
    if not whole:
        return [], ""
    softmax = setting.group("softmax")
    unit = softmax.speed() if softmax is not None else None
    reference = "relative to softmax" if unit else "relative to the slowest"
    unit = unit or min(bubble.speed for bubble in whole)
    return [replace(bubble, speed=bubble.speed / unit) for bubble in whole], reference


def _average_bubbles(settings: Sequence[Setting]) -> tuple[list[Bubble], str]:
    """Return the same over the three long tasks, for attentions that were run on all of them with one preset."""
    for preset in sorted({setting.preset for setting in settings}):
        chosen = []
        for task in LRA_TASKS:
            # The setting with the most runs stands first.
            of_task = [setting for setting in settings if (setting.paper_task, setting.preset) == (task, preset)]
            chosen += of_task[:1]
        if len(chosen) < len(LRA_TASKS):
            continue
        found = [_bubbles(setting) for setting in chosen]
        if len({reference for _, reference in found}) > 1:
            continue
        by_task = [{bubble.attention: bubble for bubble in bubbles} for bubbles, _ in found]
        common = [name for name in by_task[0] if all(name in bubbles for bubbles in by_task)]
        average = [
            Bubble(
                name,
                fmean(bubbles[name].score for bubbles in by_task),
                fmean(bubbles[name].memory for bubbles in by_task),
                geometric_mean(bubbles[name].speed for bubbles in by_task),
            )
            for name in common
        ]
        if average:
            return average, f"{found[0][1]}, preset {preset}"
    return [], ""


def _variance_drawings(artist: Artist, collection: Collection) -> list[Drawing]:
    rows = [row for analysis in collection.variance for row in analysis.rows]
    caption = " ".join(dict.fromkeys(analysis.caption for analysis in collection.variance))
    drawings = []
    for task in dict.fromkeys(str(row.get("task", "")) for row in rows):
        of_task = [row for row in rows if str(row.get("task", "")) == task]
        drawing = draw_variance(artist, task or "runs", f"Variance: {task_title(task) or 'runs'}", of_task, caption)
        if drawing is not None:
            drawings.append(drawing)
    return drawings


def _part(source: str, tag: str) -> str:
    """Return what stands between an element's tags in the template; there is one of it."""
    start = source.index(f"<{tag}>") + len(tag) + 2
    return source[start : source.index(f"</{tag}>")]


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
