"""How many threads a conversion takes: small products do not want several, least of all beside other work."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: How often each number of threads is timed, and how many times as fast several must be to be taken.
ROUNDS, FASTER = 2, 1.1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch so many threads as long as it lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_threads(run: Callable[[], object]) -> int:
    """Return 1 if something takes hardly longer with one thread than with all that torch has, else their number."""
    everything = torch.get_num_threads()
    if everything == 1:
        return 1
    seconds: dict[int, list[float]] = {1: [], everything: []}
    for _ in range(1 + ROUNDS):
        for count, times in seconds.items():
            with threads(count):
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
    one, several = (min(times[1:]) for times in seconds.values())  # the first warms up
    return everything if one > FASTER * several else 1
