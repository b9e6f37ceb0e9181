"""How many examples a step has: the paper's number, or as many of them as are allowed and fit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GIBIBYTE = 2**30


@dataclass(frozen=True)
class Batch:
    """Examples in a step, and why they are not as many as the paper's; no reason if they are, or were asked for."""

    size: int
    note: str = ""


def choose_batch(
    probe: Callable[[str, int], float],
    attentions: Sequence[str],
    *,
    paper: int,
    most: Batch | None,
    memory_limit: float,
) -> Batch:
    """The paper's batch, or the most that is allowed, halved until a step fits.

    Args:
        probe: Peak bytes of a step with an attention and a batch; infinite if it fails.
        attentions: All of them get the same batch.
        paper: The paper's batch.
        most: The largest batch allowed, with the note for a batch that it limits.
        memory_limit: GiB that a step may take.
    """
    start = Batch(paper) if most is None or most.size >= paper else most
    size = largest_that_fits(probe, attentions, start.size, memory_limit * GIBIBYTE)
    if size == start.size:
        return start
    return Batch(size, f"{size} fits {memory_limit:g} GiB") if size else Batch(1, f"1 is above {memory_limit:g} GiB")


def largest_that_fits(
    probe: Callable[[str, int], float], attentions: Sequence[str], start: int, memory_limit: float
) -> int:
    """The first of `start`, half of it, and so on, with which a step of the most demanding attention fits; 0 if none.

    Memory is linear in the batch: an estimate from 1 and 2 examples rules out what does not fit, and what seems to fit
    is tried. Attentions that fail with 1 example are not counted.
    """
    alone = {name: probe(name, 1) for name in attentions} if start > 1 else {}
    running = [name for name in alone if math.isfinite(alone[name])]
    if not running:
        return start
    name = max(running, key=alone.__getitem__)
    more = probe(name, 2) - alone[name]

    def fits(size: int) -> bool:
        if size == 1:
            return alone[name] <= memory_limit
        return alone[name] + more * (size - 1) <= memory_limit and probe(name, size) <= memory_limit

    size = start
    while size and not fits(size):
        size //= 2
    return size
