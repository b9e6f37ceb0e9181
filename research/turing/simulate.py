"""The construction beside the plain simulator, step by step.

The decoder copies its input before the machine starts, so that a word of n symbols costs n + 1 steps more. During them
the head moves to the right over empty cells; the step that finds the blank moves it back to the last symbol.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from research.turing.attention import FeatureAttention, GaussianAttention, SoftAttention
from research.turing.machine import Configuration, TuringMachine
from research.turing.transformer import COPY, Decoding, TuringTransformer


@dataclass(frozen=True)
class Comparison:
    """How far the decoder followed the machine."""

    copying: int
    """Steps that copied the input."""
    steps: int
    """Steps of the machine itself."""
    first_wrong: int | None
    """The first output that is not what it should be, counted with the copying from y_0; None if all are right."""

    @property
    def agrees(self) -> bool:
        return self.first_wrong is None

    @property
    def right_steps(self) -> int:
        """Steps, copying included, before the first wrong one."""
        return self.copying + self.steps if self.first_wrong is None else self.first_wrong - 1


def expected_trace(machine: TuringMachine, word: str, max_steps: int) -> list[Configuration]:
    """What y_0, y_1, ... have to say: the copying, then the plain simulator's trace."""
    copying = [Configuration(COPY, machine.blank, cell, int(cell > 0)) for cell in range(len(word) + 1)]
    trace = machine.run(word, max_steps)
    return [*copying, replace(trace[0], move=-1), *trace[1:]]


def compare(model: TuringTransformer, word: str, max_steps: int, attention: GaussianAttention) -> Comparison:
    """Run the decoder until it disagrees with the machine, or the machine halts, or the limit is reached.

    Args:
        model: Weights for the machine.
        max_steps: Limit of the machine's own steps.
    """
    expected = expected_trace(model.machine, word, max_steps)
    copying = len(word) + 1
    comparison = Comparison(copying, len(expected) - 1 - copying, None)
    decoding = Decoding(model, word, attention)
    for index, configuration in enumerate(expected):
        y = decoding.y if index == 0 else decoding.step()
        if model.read(y) != configuration:
            return replace(comparison, first_wrong=index)
    return comparison


def decoded_trace(
    model: TuringTransformer, word: str, max_steps: int, attention: GaussianAttention
) -> list[Configuration | None]:
    """What the decoder says at y_0, y_1, ..., for as many steps as the machine takes; None where it is no encoding."""
    decoding = Decoding(model, word, attention)
    steps = len(expected_trace(model.machine, word, max_steps)) - 1
    return [model.read(decoding.y), *(model.read(decoding.step()) for _ in range(steps))]


def tape_of(machine: TuringMachine, word: str, trace: Sequence[Configuration | None]) -> str:
    """The tape that a trace leaves, from the first cell that is not blank to the last.

    An output has no tape; but the state and the symbol of each say what is written next, and where.
    """
    tape: dict[int, str] = {}
    for configuration in trace[:-1]:
        if configuration is None:
            continue
        written = _written(machine, word, configuration)
        if written is not None:
            tape[configuration.head] = written
    used = [cell for cell, symbol in tape.items() if symbol != machine.blank]
    return "".join(tape.get(cell, machine.blank) for cell in range(min(used), max(used) + 1)) if used else ""


def _written(machine: TuringMachine, word: str, configuration: Configuration) -> str | None:
    """What is written from here: the input while it is copied, then what the rules say; nothing after the halt."""
    if configuration.state == COPY:
        return word[configuration.head] if 0 <= configuration.head < len(word) else None
    action = machine.rules.get((configuration.state, configuration.symbol))
    return None if action is None else action.write


def highest_temperature(
    model: TuringTransformer, word: str, max_steps: int, *, exponents: Iterable[int] = range(4, -64, -1)
) -> float | None:
    """The highest temperature, as a power of two, at which soft attention follows the machine to the end.

    It has to do so at 1, 2, 4, 8 and 16 powers of two below as well, so that one lucky temperature does not count.

    Args:
        exponents: Powers of two to try, from the highest.

    Returns:
        The temperature, or None if there is none among those tried.
    """

    def survives(exponent: int) -> bool:
        return compare(model, word, max_steps, SoftAttention(2.0**exponent)).agrees

    for exponent in exponents:
        if all(survives(exponent - below) for below in (0, 1, 2, 4, 8, 16)):
            return 2.0**exponent
    return None


@dataclass(frozen=True)
class Survival:
    """What random features can do at one temperature."""

    temperature: float
    fewest: int | None
    """The number of samples from which on all seeds follow the machine to the end, if there is one."""
    right_steps: int
    """Steps before the first wrong one, in the worst of the seeds: at that number, or else at the largest."""


def fewest_samples(
    model: TuringTransformer,
    word: str,
    max_steps: int,
    *,
    feature_map: Literal["rks", "prf"],
    temperature: float,
    numbers: Sequence[int],
    seeds: Sequence[int],
) -> Survival:
    """The number of samples from which on attention with random features follows the machine to the end.

    All seeds have to, at this number and at the next two, so that luck does not count.

    Args:
        numbers: Numbers of samples to try, from the smallest.
    """

    def attempt(number: int, seed: int) -> Comparison:
        return compare(model, word, max_steps, FeatureAttention(feature_map, number, temperature, seed))

    survivors = 0
    for index, number in enumerate(numbers):
        survivors = survivors + 1 if all(attempt(number, seed).agrees for seed in seeds) else 0
        last = index == len(numbers) - 1
        if survivors == 3 or (survivors and last):
            full = len(expected_trace(model.machine, word, max_steps)) - 1
            return Survival(temperature, numbers[index + 1 - survivors], full)
    return Survival(temperature, None, min(attempt(numbers[-1], seed).right_steps for seed in seeds))


def best_survival(candidates: Iterable[Survival]) -> Survival:
    """The fewest samples; if there is none, the most right steps."""
    return min(candidates, key=lambda found: (found.fewest is None, found.fewest or 0, -found.right_steps))


def first_tie(limit: int = 10_000_000) -> int | None:
    """The first step at which float64 can't tell two visits apart in the appendix's construction.

    Just before a first visit, the keys of the neighbouring cell have scores -1 - 1/(j+1)^2; the nearest that two visits
    to it can be are j = i and j = i - 2. Rounded to float64, their scores are equal from some i on.

    Returns:
        The smallest such i, or None if it is above the limit.
    """
    inverse = 1 / np.arange(1, limit + 1, dtype=np.float64)
    scores = 1 + np.square(inverse)
    ties = np.flatnonzero(scores[2:] == scores[:-2])
    return int(ties[0]) + 2 if len(ties) else None
