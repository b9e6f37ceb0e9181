"""A conversion takes one thread where several are not faster, and gives back as many as there were."""

import pytest
import torch
from conversion_support import FAMILIES, batches, convert

from klformer.conversion import learning, threads


@pytest.fixture
def clock(monkeypatch):
    """Two threads, and a function that takes as many seconds as it is told, by the number of threads."""
    now = [0.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def lasting(seconds):
        def run():
            now[0] += seconds[torch.get_num_threads()]

        return run

    yield lasting
    torch.set_num_threads(before)


@pytest.mark.parametrize(("one", "two", "best"), [(1.0, 30.0, 1), (1.0, 0.95, 1), (1.0, 0.6, 2)])
def test_more_threads_must_be_faster(clock, one, two, best):
    assert threads.best_threads(clock({1: one, 2: two})) == best
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_conversion_works_with_the_best_number(clock, monkeypatch, count):
    seen = set()
    monkeypatch.setattr(learning, "best_threads", lambda run: count)
    data = {"options": {"num_frequencies": 8}, "steps": 2, "progress": lambda *_: seen.add(torch.get_num_threads())}
    conversion = convert(FAMILIES["bert"](), batches("bert"), **data)
    assert seen == {count}
    assert torch.get_num_threads() == 2
    assert ("on one thread: 2 are not faster here" in conversion.certificate.notes) == (count == 1)
