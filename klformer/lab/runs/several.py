"""Several runs: what is done is not done again, interrupted ones go on, one after the other or side by side."""

from collections.abc import Callable, Sequence
from typing import Any

from klformer.errors import ArgumentError, RunError
from klformer.lab.runs.changes import LENGTH, changes
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.jobs import Job, train_side_by_side
from klformer.lab.runs.train import finished_result, train_run
from klformer.lab.tasks import build_task
from klformer.lab.training.processes import is_distributed, is_main_process
from klformer.lab.training.progress import Reporter, SilentReporter


def train_several(
    runs: Sequence[Job],
    *,
    reporter: Reporter,
    jobs: int = 1,
    labelled: Callable[[str], Reporter] = lambda label: SilentReporter(),
) -> list[dict[str, Any]]:
    """Do every run that is not done yet; returns all results, in the order of the runs.

    Args:
        runs: Each in a folder of its own.
        reporter: Told what happens.
        jobs: Trainings side by side, in processes with one thread each.
        labelled: Gives the reporters of runs side by side, for a label each.
    """
    if jobs > 1 and is_distributed():
        raise ArgumentError(f"jobs must be 1 where torchrun has started several processes, got {jobs}")
    if not is_main_process():
        reporter = SilentReporter()
    finished = [finished_result(run.config, run.folder) for run in runs]
    for run, done in zip(runs, finished, strict=True):
        if done is None:
            _check_length(run)
    if jobs == 1:
        return _one_after_the_other(runs, finished, reporter)
    return _side_by_side(runs, finished, reporter, jobs, labelled)


def _check_length(run: Job) -> None:
    """A finished run is not made longer: its schedule would be another than that of the runs beside it."""
    folder = RunFolder(run.folder)
    if not folder.is_run():
        return
    before = folder.config()
    longer = [text for field, text in changes(before, run.config).items() if field in LENGTH]
    if longer and finished_result(before, run.folder) is not None:
        raise RunError(
            f"{run.folder} is finished and is not made longer: {', '.join(longer)}; ask for what it was, or give "
            "another --out"
        )


Finished = Sequence[dict[str, Any] | None]


def _one_after_the_other(runs: Sequence[Job], finished: Finished, reporter: Reporter) -> list[dict[str, Any]]:
    results = []
    for number, (run, done) in enumerate(zip(runs, finished, strict=True), start=1):
        reporter.say(f"[{number}/{len(runs)}] {run.folder.name}{': done already' if done else ''}")
        results.append(done or train_run(run.config, run.folder, resume=True, reporter=reporter))
    return results


def _side_by_side(
    runs: Sequence[Job], finished: Finished, reporter: Reporter, jobs: int, labelled: Callable[[str], Reporter]
) -> list[dict[str, Any]]:
    todo = [number for number, done in enumerate(finished) if done is None]
    if len(todo) < len(runs):
        reporter.say(f"{len(runs) - len(todo)} of {len(runs)} runs are done already")
    if not todo:
        return [done for done in finished if done is not None]
    quiet = isinstance(reporter, SilentReporter)
    # Once, before several want to.
    for config in {(run.config.task, run.config.data): run.config for run in runs}.values():
        build_task(config.task, config.data, quiet=quiet).prepare()

    def reporter_of(number: int) -> Reporter:
        return labelled(f"[{todo[number] + 1}/{len(runs)}]")

    made = train_side_by_side([runs[number] for number in todo], workers=jobs, reporter_of=reporter_of)
    new = dict(zip(todo, made, strict=True))
    return [done if done is not None else new[number] for number, done in enumerate(finished)]
