"""`klformer predict`: what a run says of rows without labels."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory

import tyro

from klformer.errors import ArgumentError, DataError
from klformer.lab.cli.command import Command, read_options
from klformer.lab.runs.folder import RunFolder
from klformer.lab.runs.load import load_run
from klformer.lab.runs.predict import predict_file
from klformer.lab.tasks import DataConfig
from klformer.lab.tasks.files import say
from klformer.lab.training.progress import make_reporter

#: Standard input, or standard output.
PIPE = Path("-")


@dataclass(frozen=True)
class Predict:
    """Predict the labels of the rows of a file with the best checkpoint of a run.

    A row gets its label, the label's probability and its deviation over draws of the frequencies, and the same for all
    classes; with numbers to predict, the number and its deviation. Columns and format are those that the run was
    trained with, if no `--data.*` says otherwise. Example:

      klformer predict runs/csv-reviews-laptop-gmm-rks-seed0 new.csv --out predictions.csv
      cat new.csv | klformer predict runs/csv-reviews-laptop-gmm-rks-seed0 - --out - | head
    """

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    input: tyro.conf.Positional[Path]
    """File to read: as the training file, without labels; - is standard input, in the format of the training file. For
    runs on images, a folder or an image."""
    out: Path
    """File to write: .csv, .tsv, .jsonl or .parquet; - is standard output, in csv."""
    draws: int = 10
    """Draws of the frequencies."""
    keep: tuple[str, ...] = ()
    """Columns of the input to pass on."""
    quiet: bool = False
    """Say nothing but errors."""
    data: DataConfig = field(default_factory=DataConfig)
    """How the input is read, where it differs from the run's own."""


def parse(arguments: Sequence[str], prog: str) -> Predict:
    """Read the options; the defaults of `--data.*` are those of the run, which is the first argument that is no
    flag."""
    named = next((RunFolder(Path(word)) for word in arguments if not word.startswith("-")), None)
    if named is None or not named.is_run():
        # Without a run to take defaults from: what is wrong, or the help, comes from here.
        return read_options(Predict, arguments, prog)
    default = Predict(run=tyro.MISSING, input=tyro.MISSING, out=tyro.MISSING, data=named.config().data)
    return read_options(Predict, arguments, prog, default=default)


def predict_labels(options: Predict) -> None:
    """Predict, and say where the predictions are."""
    if options.draws < 1:
        raise ArgumentError(f"draws must be at least 1, got {options.draws}")
    is_shown = options.out == PIPE
    reporter = make_reporter(quiet=options.quiet or is_shown)
    loaded = load_run(options.run, reporter, data=options.data)
    with ExitStack() as until_end:
        source, out = options.input.expanduser(), options.out.expanduser()
        if PIPE in (source, out):
            folder = Path(until_end.enter_context(TemporaryDirectory()))
            source = _received(folder, loaded.config.data) if source == PIPE else source
            out = folder / "out.csv" if is_shown else out
            until_end.enter_context(_named_without(folder))
        count = predict_file(loaded, source, out, draws=options.draws, keep=options.keep)
        if is_shown:
            with out.open("rb") as file:
                copyfileobj(file, sys.stdout.buffer)
    for sentence in loaded.task.notes():
        say(f"note: {sentence}", quiet=options.quiet)
    reporter.say(f"{count:,} predictions in {options.out}")


@contextmanager
def _named_without(folder: Path) -> Iterator[None]:
    """Name files in a temporary folder without it in errors."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(f"{folder}/", "")) from error


def _received(folder: Path, data: DataConfig) -> Path:
    """Write what comes over standard input to a file; tables are read more than once."""
    train = getattr(data, "train", None)
    path = folder / f"stdin{'.csv' if train is None else train.suffix}"
    with path.open("wb") as file:
        copyfileobj(sys.stdin.buffer, file)
    return path


COMMAND = Command(parse, predict_labels)
