"""From the evidence to an answer: the attention that recalled best among those that fit the needs.

The evidence is the file measured.json beside this one, written by `klformer analyze evidence` from runs on
recall. Work is counted in multiplications for one query and one head, which do not depend on a machine:

    softmax   L (D + E)                 each query with each key, and each weight with its value
    kernel    2 R D + 2 F E             both projections on R frequencies; F features into the state and out of it
    window    (2 w + 1) (D + E)         each query with its neighbours besides, and each weight with its value

with F = R for positive features and 2 R for Fourier features. Multiplications are not time: on short sequences a kernel
with fewer of them than softmax may be slower. So times.json has what `klformer bench attention` measured, and an
attention that was not 5% faster than softmax at the length is left out.

Attentions within half a point of the best one count as equals. Among equals the first of these decides:

    less work
    the paper's kernels before ours, which have been tried less
    options as they are before a kernel that is frozen or keeps its draw
    a smaller deviation over seeds
    the order of `klformer.attention_names()`
"""

import json
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from klformer.attention import AttentionSpec, attention_names, attention_options
from klformer.errors import DataError

_FILE, _TIMES = "measured.json", "times.json"
_KEYS = {False: "learned", True: "frozen"}
#: The part of softmax's time that an attention may take, to be called faster: times differ by some percent.
_FASTER = 0.95
#: Head size of the times; of another, times change as work does.
_TIMED_HEAD_DIM = 64
_SETTING = "recall-laptop: accuracy, %"
#: Frequencies for each dimension of a head in the runs that were measured.
_FREQUENCIES_PER_DIM = 2
#: Points of accuracy within which attentions count as equally good: about three deviations over seeds.
_TIE = 0.5
#: Kernels that are not in the paper.
_OURS = ("atoms-rks", "atoms-prf", "rbf-rks")


@dataclass(frozen=True)
class Needs:
    """What somebody wants."""

    length: int
    budget: float = 1.0
    deterministic: bool = False
    head_dim: int = 64


@dataclass(frozen=True)
class Answer:
    """An attention as the command line takes it, why, and what it was chosen from."""

    attention: str
    reasons: Sequence[str]
    candidates: Sequence[Mapping[str, Any]]
    title: str


def recommend(needs: Needs) -> Answer:
    """Return the best attention that fits; among equals the rule at the top of this file decides.

    If nothing fits the budget, it is the cheapest of those that fit the other needs.
    """
    evidence = measurements()
    rows = [row for row in evidence["rows"] if row["setting"] == _SETTING]
    both = [(row, frozen) for row in rows for frozen in (False, True) if row[_KEYS[frozen]] is not None]
    candidates = [_candidate(row, frozen, needs) for row, frozen in both]
    candidates = [each for each in candidates if not (needs.deterministic and each["draw"] == "redrawn")]
    slow = [each for each in candidates if each["time"] > _FASTER and each["attention"] != "softmax"]
    allowed = [each for each in candidates if each["work"] <= needs.budget and each not in slow]
    allowed.sort(key=lambda candidate: (-candidate["accuracy"], _preference(candidate)))
    facts = evidence["environment"]
    title = (
        f"recall: accuracy in %, {facts['processor']}, {facts['date'][:10]}; work (multiplications) and time relative "
        f"to softmax at {needs.length:,} tokens, D = {needs.head_dim}"
    )
    if not allowed:
        cheapest = min(candidates, key=_preference)
        reason = (
            f"nothing that was measured fits a budget of {needs.budget:g}; {cheapest['attention']} is cheapest, with "
            f"{cheapest['work']:.2f}. Fewer frequencies cost less, in proportion (num_frequencies)"
        )
        return Answer(cheapest["attention"], [reason], sorted(candidates, key=_preference), title)
    best = allowed[0]
    equals = [candidate for candidate in allowed if best["accuracy"] - candidate["accuracy"] <= _TIE]
    chosen = min(equals, key=_preference)
    reasons = _reasons(chosen, best, candidates, needs)
    if slow:
        least = min(slow, key=_preference)["attention"]
        reasons.insert(1, f"{len(slow)} are not faster than softmax at this length, such as {least}")
    return Answer(chosen["attention"], reasons, [chosen, *(each for each in allowed if each is not chosen)], title)


def _reasons(
    chosen: Mapping[str, Any], best: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]], needs: Needs
) -> list[str]:
    reasons = [f"it reached {chosen['accuracy']:.1f}% on recall and takes {chosen['work']:.2f} of softmax's work"]
    if chosen is not best:
        score, work = f"{best['accuracy']:.1f}%", f"{best['work']:.2f}"
        reasons.append(f"{best['attention']} reached {score} and takes {work}: within {_TIE:g} point they are equals")
    softmax = next((candidate for candidate in candidates if candidate["attention"] == "softmax"), None)
    if softmax is not None and softmax is not chosen and softmax is not best:
        reasons.append(f"softmax reached {softmax['accuracy']:.1f}%; its work grows with the length")
    if needs.deterministic:
        reasons.append("deterministic: attentions whose frequencies are redrawn are left out")
    reasons.append(
        "recall is one task; compare on your own: klformer compare --task YOURS --attentions ... --seeds 0 1 2"
    )
    return reasons


def _preference(candidate: Mapping[str, Any]) -> tuple[float, ...]:
    """Return what decides among equals, the smallest first: the rule at the top of this file."""
    spec = AttentionSpec.parse(candidate["attention"])
    deviation = candidate["deviation"]
    return (
        candidate["work"],
        spec.name in _OURS,
        len(spec.options),
        math.inf if deviation is None else deviation,
        attention_names().index(spec.name),
    )


def measurements() -> dict[str, Any]:
    """Return what `klformer analyze evidence` wrote for the package."""
    return _packaged(_FILE)


@cache
def _packaged(name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((files("klformer.lab.analysis") / name).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"the measurements {name} of the package can't be read: {error}; install it again") from error
    return content


def _candidate(row: Mapping[str, Any], frozen: bool, needs: Needs) -> dict[str, Any]:
    spec = AttentionSpec.parse(row["attention"])
    options = dict(spec.options)
    if frozen:
        options["frozen"] = True
    if row["draw"] == "kept":
        options["redraw"] = False
    return {
        "attention": AttentionSpec(name=spec.name, options=options).label(),
        "draw": row["draw"],
        "accuracy": row[_KEYS[frozen]],
        "deviation": row[f"{_KEYS[frozen]}_std"],
        "work": relative_work(spec.name, needs.length, needs.head_dim),
        "time": relative_time(spec.name, needs.length, needs.head_dim),
    }


def relative_time(attention: str, length: int, head_dim: int) -> float:
    """Time relative to softmax's; between and beyond the lengths that were measured on lines of logarithms."""
    seconds = _packaged(_TIMES)["seconds"]
    lengths = sorted(map(int, seconds["softmax"]))
    ratios = [math.log(seconds[attention][str(each)] / seconds["softmax"][str(each)]) for each in lengths]
    place = min(max(bisect(lengths, length), 1), len(lengths) - 1)
    (left, right), (low, high) = map(math.log, lengths[place - 1 : place + 1]), ratios[place - 1 : place + 1]
    found = math.exp(low + (high - low) * (math.log(length) - left) / (right - left))
    return found * relative_work(attention, 1, head_dim) / relative_work(attention, 1, _TIMED_HEAD_DIM)


def relative_work(attention: str, length: int, head_dim: int) -> float:
    """Return multiplications for one query of one head, relative to softmax's; E = D.

    Args:
        attention: A name, perhaps with options; of these frequencies and a window count.
        length: Tokens L.
        head_dim: Size D.
    """
    spec = AttentionSpec.parse(attention)
    if spec.name == "softmax":
        return 1.0
    window = int(str(spec.options.get("window", 0)))
    near = (2 * window + 1) * 2 * head_dim if window else 0
    if "num_frequencies" not in attention_options(spec.name):  # linear-elu: D features, no projection
        return (2 * head_dim * head_dim + near) / (2 * length * head_dim)
    frequencies = int(str(spec.options.get("num_frequencies", _FREQUENCIES_PER_DIM * head_dim)))
    features = 2 * frequencies if spec.name.endswith("rks") else frequencies
    return (2 * frequencies * head_dim + 2 * features * head_dim + near) / (2 * length * head_dim)
