"""Runs that are read back from their folders; nothing is unpickled.

A stranger's configuration is believed as far as the weights beside it bear it out: sizes are compared with the header
of the weights before anything of that size is made. Data is generated in the cache and in the run's own folder;
elsewhere, or in great numbers, only if the user names the place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from klformer.errors import RunError, UserError
from klformer.lab.data import Examples
from klformer.lab.runs.changes import flatten
from klformer.lab.runs.config import ExperimentConfig, build_model
from klformer.lab.runs.find import find_runs
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.rates import at_chosen_rates
from klformer.lab.tasks import DataConfig, Split, Task
from klformer.lab.tasks.files import only_reading
from klformer.lab.training.checkpoint import Checkpoint, CheckpointStore, check_shapes, put_weights
from klformer.lab.training.evaluation import Evaluation, evaluate
from klformer.lab.training.metrics import Metric
from klformer.lab.training.processes import make_accelerator
from klformer.lab.training.progress import Reporter

#: A size up to this is harmless, whether the model has a tensor of it or not.
HARMLESS = 10_000
#: More examples, or longer sequences, are not generated for a run that was only to be read.
MOST = 10**7


def check_model_sizes(
    config: ExperimentConfig, task: Task, shapes: Mapping[str, tuple[int, ...]], source: Path
) -> None:
    """Compare the model that a configuration describes with the shapes of weights, without making either."""
    _check_most(config)
    numbers = sum(map(prod, shapes.values()))
    # Every size that a model has is a size of one of its tensors, or their number.
    described = {"model": config.model.model_dump(), "attention": config.attention.options}
    if config.encoder is not None:
        described["encoder"] = config.encoder.architecture
    for name, value in flatten(described).items():
        if _is_size(value) and value > max(numbers, HARMLESS):
            raise RunError(f"{source} does not fit the configuration: {name} is {value:,}, it has {numbers:,} numbers")
    with torch.device("meta"):
        model = build_model(config, task)
    check_shapes(shapes, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, source)


def may_generate(task: Task, run: Path) -> bool:
    """Return whether data of a run may be generated where its configuration says."""
    place = task.root.resolve()
    return any(place.is_relative_to(folder.resolve()) for folder in (DataConfig().folder(), run))


def _check_most(config: ExperimentConfig) -> None:
    for name, value in flatten(config.data.model_dump()).items():
        if _is_size(value) and name != "seed" and value > MOST:
            raise RunError(
                f"the configuration asks for data.{name} = {value:,}, more than a run is read with ({MOST:,}); "
                "change its config.json if that is meant"
            )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class LoadedRun:
    """A run that was read back, with the weights of its best checkpoint, or of another if that is damaged.

    `load_run` makes one.
    """

    run: RunFolder
    config: ExperimentConfig
    task: Task
    model: nn.Module
    step: int
    #: Which of the run's checkpoints the weights are of, in words.
    weights: str
    #: The data is to be the run's own; not if another folder of data was asked for.
    own_data: bool

    @property
    def folder(self) -> Path:
        return self.run.path

    @property
    def metric(self) -> Metric:
        """The metric that selects."""
        return self.task.objective().selecting

    def examples(self, split: Split) -> Examples:
        """Return the examples of a split.

        Args:
            split: "train", "validation" or "test".
        """
        if self.own_data and not may_generate(self.task, self.folder):
            with only_reading(f"; --data-root {self.task.root} generates it there, if you want that"):
                examples = self.task.load(split)
        else:
            examples = self.task.load(split)
        if self.own_data:
            self.run.check_same_data({split: examples})
        return examples

    def evaluate(self, split: Split, *, draws: int, accelerator: Accelerator | None = None) -> Evaluation:
        """Compute all metrics on a split, averaged over draws of the frequencies.

        Args:
            split: "train", "validation" or "test".
            draws: How many draws.
            accelerator: Where it is computed; as the run was trained if None.
        """
        return evaluate(
            self.model,
            self.examples(split),
            objective=self.task.objective(),
            accelerator=accelerator or make_accelerator(self.config.training),
            batch_size=self.config.training.evaluation_batch_size,
            draws=draws,
            seed=self.config.seed,
        )

    def at_start(self) -> nn.Module:
        """Return the same model with the weights that the run started from."""
        model = build_model(self.config, self.task)
        put_weights(model, self.run.initial_weights(), self.folder / RunFolder.INITIAL)
        return model.eval()


def load_run(
    folder: Path, reporter: Reporter, *, data_root: Path | None = None, data: DataConfig | None = None
) -> LoadedRun:
    """Read a run back; nothing is unpickled.

    Args:
        folder: The run's own folder, inside of the one that `--out` named.
        reporter: Told which checkpoints are damaged, if any are; `SilentReporter()` says nothing.
        data_root: Where the data is, if not where the run had it.
        data: How other data is read, if not as the run read its own.

    Returns:
        What the run consists of, with its model in evaluation mode.

    Raises:
        RunError: the folder is not a run's, is of another format, or has no whole checkpoint that fits its
            configuration.
        ArgumentError: its configuration is not valid.

    Examples:
        A run of one step, trained and read back:

        >>> import tempfile
        >>> from pathlib import Path
        >>> from klformer.lab.cli.main import main
        >>> from klformer.lab.runs.load import load_run
        >>> from klformer.lab.training.progress import SilentReporter
        >>> flags = "--data.num-examples 8 --data.test-limit 8 --data.validation-limit 8 --training.max-steps 1"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     main(f"train --task recall --attention linear-elu --quiet --out {folder} {flags}".split())
        ...     run, = Path(folder).iterdir()
        ...     loaded = load_run(run, SilentReporter())
        ...     test, start = loaded.examples("test"), loaded.at_start()
        ...     evaluation = loaded.evaluate("test", draws=1)
        >>> loaded.task.name, loaded.step, loaded.weights
        ('recall', 1, 'best checkpoint, step 1')
        >>> len(test), evaluation.num_examples, type(start) is type(loaded.model)
        (8, 8, True)
    """
    run = RunFolder(folder)
    config = run.config()
    chosen = data or (config.data if data_root is None else config.data.model_copy(update={"root": data_root}))
    task = config.model_copy(update={"data": chosen}).make_task()
    task.know(run.knowledge())
    store = run.checkpoints(reporter.say)
    checkpoint, which = _best_of(store, folder)
    check_model_sizes(config, task, checkpoint.shapes(), checkpoint.folder)
    model = build_model(config, task)
    put_weights(model, checkpoint.weights(), checkpoint.folder)
    weights, own_data = f"{which}, step {checkpoint.step}", data_root is None and data is None
    return LoadedRun(run, config, task, model.eval(), checkpoint.step, weights, own_data=own_data)


class RunReader:
    """Reads several runs for one command: what is no run is left out with a note, and damaged ones do not stop it.

    Of finished runs that differ in their learning rate alone those are left out, with a note as well, whose rate was
    not the best on validation at the first seed that has several: a command that takes seeds together is not to take
    together what was tried and what was chosen.

    Args:
        reporter: Told what is left out.
        data_root: Where the data is, if not where the runs had it.
    """

    def __init__(self, reporter: Reporter, *, data_root: Path | None = None) -> None:
        self._reporter = reporter
        self._data_root = data_root
        self._damaged: list[str] = []

    def read(self, folders: Sequence[Path]) -> Iterator[LoadedRun]:
        """Yield the runs in these folders, and below them."""
        paths = {path.resolve(): path for folder in folders for path in find_runs(folder)}
        empty = [folder for folder in folders if not find_runs(folder)]
        if not paths:
            raise RunError(f"there is no run in {', '.join(map(str, empty))}" if empty else "give at least one run")
        for folder in empty:
            self._reporter.say(f"note: {folder} is not a run and holds none; left out")
        readable = [run for run in map(RunFolder, paths.values()) if self._is_readable(run)]
        chosen = at_chosen_rates(readable)
        if len(chosen) < len(readable):
            left_out = f"{len(readable) - len(chosen)} runs with learning rates that are not the best on validation"
            self._reporter.say(f"note: {left_out} are left out")
        for run in chosen:
            try:
                loaded = load_run(run.path, self._reporter, data_root=self._data_root)
            except UserError as error:
                self._damaged.append(str(error))
                continue
            yield loaded

    def _is_readable(self, run: RunFolder) -> bool:
        try:
            run.config()
            result = run.result()
            if result is not None and ("metric" not in result or not isinstance(result.get("validation"), dict)):
                raise RunError(f"{run.path / run.RESULT} is not a run's result: metric or validation is missing")
        except UserError as error:
            self._damaged.append(str(error))
            return False
        return True

    def finish(self) -> None:
        """Raise RunError if runs could not be read; to be called when everything is written."""
        if self._damaged:
            raise RunError(f"runs that can't be read were left out: {'; '.join(self._damaged)}")


def _best_of(store: CheckpointStore, folder: Path) -> tuple[Checkpoint, str]:
    """Return the best checkpoint that is whole, and what it is."""
    if best := store.newest("best"):
        return best, "best checkpoint" if store.is_last(best, "best") else "an earlier best checkpoint"
    if newest := store.newest("step"):
        return newest, "newest checkpoint, not the best one" if store.holds("best") else "newest checkpoint"
    raise RunError(f"{folder} has no whole checkpoint")
