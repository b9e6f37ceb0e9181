"""Checks of arguments: a bad value raises an error that names the argument, the value and what would be right."""

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

from klformer.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")

#: No size of a model is near it, and what does not fit torch's integers is far above.
MAX_SIZE = 2**31 - 1


def check_number(name: str, value: float, *, minimum: float = 0.0, exclusive: bool = False) -> None:
    """Raises TypeError unless `value` is a number, ValueError unless it is finite and at least (above) `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value) or value < minimum or (exclusive and value == minimum):
        raise ArgumentError(
            f"{name} must be finite and {'above' if exclusive else 'at least'} {minimum:g}, got {value!r}"
        )


def check_flag(name: str, value: bool) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def check_count(name: str, value: int, minimum: int = 1, maximum: int = MAX_SIZE) -> None:
    """Raises TypeError or ValueError unless `value` is a whole number from `minimum` to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < minimum:
        raise ArgumentError(f"{name} must be at least {minimum}, got {value}")
    if value > maximum:
        raise ArgumentError(f"{name} must be at most {maximum:,}, got {value}")


def check_choice(name: str, value: T, allowed: Iterable[T]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    choices = list(allowed)
    if value not in choices:
        raise ArgumentError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{suggestion(value, choices)}"
        )


def check_probability(name: str, value: float) -> None:
    """Raises TypeError unless `value` is a number, ValueError unless 0 <= value < 1."""
    check_number(name, value)
    if value >= 1:
        raise ArgumentError(f"{name} must be at least 0 and below 1, got {value!r}")


def suggestion(value: object, choices: Iterable[object]) -> str:
    """'; did you mean ...?' for the nearest choice, or nothing if none is near."""
    names = [str(choice) for choice in choices]
    text = str(value)
    short = [name for name in names if _shortens(text, name)]
    near = short[:1] or get_close_matches(text, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shortens(text: str, name: str) -> bool:
    """Whether a text may be short for a name: `lr` for `learning_rate`, `nfreq` for `num_frequencies`.

    What stands before the last dot, as in flags, must be the same in both.
    """
    (section, _, text), (of, _, name) = text.rpartition("."), name.rpartition(".")
    words = [word for word in re.split("[-_]", name) if word]
    if section != of or len(text) < 2 or len(words) < 2:
        return False
    # Every letter is the next of a word, or begins a later one.
    ways = {(0, 0)}
    for letter in text:
        ways = {
            (later, 1 + words[later].index(letter, place if later == word else 0))
            for word, place in ways
            for later in range(word, len(words))
            if letter in (words[word][place:] if later == word else words[later][:1])
        }
    return text[0] == words[0][0] and any(word == len(words) - 1 for word, _ in ways)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """What to say of a name that nothing has: the nearest one, and all of them."""
    names = list(known)
    return f"unknown {kind} {name!r}{suggestion(name, names) or '.'} Known: {', '.join(names)}"
