"""Predictions of a run for rows without labels: read, answered and written some at a time.

Every row gets the mean of the model's answers over draws of the frequencies, and their deviation: probabilities of
classes, or a number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from klformer.errors import ArgumentError, RunError
from klformer.lab.data import BucketSampler, Examples, collate
from klformer.lab.runs.load import LoadedRun
from klformer.lab.runs.table_writer import writing_table
from klformer.lab.tasks.base import InputChunk
from klformer.lab.training.evaluation import evaluating, outputs_of_draws
from klformer.noise import has_noise

#: Rows that are in memory at a time.
CHUNK = 4096


@dataclass(frozen=True)
class Answers:
    """What the model says of some rows.

    Args:
        mean: (N, K), over draws: probabilities of classes, or the number.
        deviation: (N, K), over draws; 0 if there was one.
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]


def predict_file(loaded: LoadedRun, path: Path, out: Path, *, draws: int, keep: Sequence[str] = ()) -> int:
    """Write a prediction for every row of a file; returns how many there are."""
    _check_place(loaded, path, out)
    names = loaded.task.class_names() or _numbered(loaded)
    count = 0
    with writing_table(out, _columns(loaded.task.row_column, names, keep)) as write:
        for chunk in loaded.task.read_inputs(path, keep=keep, chunk=CHUNK):
            write(list(_rows(chunk, answer(loaded, chunk, draws=draws), names)))
            count += len(chunk.rows)
    return count


def _check_place(loaded: LoadedRun, path: Path, out: Path) -> None:
    """Refuse to write predictions over a file that they are made from."""
    files = [value for value in dict(loaded.config.data).values() if isinstance(value, Path)]
    read = [path, *files, *loaded.run.path.glob("*.*")]
    if out.exists() and any(file.exists() and out.samefile(file) for file in read):
        raise ArgumentError(f"--out must be another file than those that are read, got {str(out)!r}")


def answer(loaded: LoadedRun, chunk: InputChunk, *, draws: int) -> Answers:
    """Return the mean of the model's answers over draws, and their deviation."""
    objective, model, training = loaded.task.objective(), loaded.model, loaded.config.training
    examples = Examples(chunk.sequences, np.zeros(len(chunk.rows), np.int64), chunk.second)
    mean = np.zeros((len(examples), objective.num_outputs))
    deviation = np.zeros_like(mean)
    numbers = range(draws if has_noise(model) else 1)
    sampler = BucketSampler(examples.lengths, batch_size=training.evaluation_batch_size, shuffle=False)
    device = next(model.parameters()).device
    with evaluating(model):
        for indices in sampler.batches(0):
            batch = collate(examples, indices).to(device)
            outputs = outputs_of_draws(model, batch, numbers, seed=loaded.config.seed, outputs=objective.outputs)
            answers = objective.answers(outputs.double())
            mean[indices] = answers.mean(0).cpu().numpy()
            if not np.isfinite(mean[indices]).all():
                wrong = next(index for index in indices if not np.isfinite(mean[index]).all())
                raise RunError(f"{loaded.folder}: the model's answer to row {chunk.rows[wrong]} is not a finite number")
            if len(numbers) > 1:
                deviation[indices] = torch.std(answers, 0).cpu().numpy()
    return Answers(mean, deviation)


def _numbered(loaded: LoadedRun) -> tuple[str, ...] | None:
    """Return numbers as names of classes that have none; a single output is no class."""
    outputs = loaded.task.objective().num_outputs
    return tuple(map(str, range(outputs))) if outputs > 1 else None


def _columns(row: tuple[str, type], names: Sequence[str] | None, keep: Sequence[str]) -> dict[str, type]:
    columns: dict[str, type] = dict([row]) | dict.fromkeys(keep, str)
    if names is None:
        return columns | {"prediction": float, "deviation": float}
    columns |= {"prediction": str, "probability": float, "deviation": float}
    return columns | {f"p({name})": float for name in names} | {f"deviation({name})": float for name in names}


def _rows(chunk: InputChunk, answers: Answers, names: Sequence[str] | None) -> Iterator[list[Any]]:
    best = answers.mean.argmax(1)
    for place, number in enumerate(chunk.rows):
        mean, deviation, chosen = answers.mean[place], answers.deviation[place], best[place]
        start: list[Any] = [number, *chunk.kept[place]]
        if names is None:
            yield [*start, float(mean[0]), float(deviation[0])]
        else:
            said = [names[chosen], float(mean[chosen]), float(deviation[chosen])]
            yield [*start, *said, *mean.tolist(), *deviation.tolist()]
