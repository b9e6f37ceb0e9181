"""Learning rates against values worked out by hand."""

import pytest

from klformer.lab.training.config import ScheduleConfig
from klformer.lab.training.optimiser import learning_rate


def rates(kind, warmup, steps, *, base=0.05, total=20_000):
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup)
    return [learning_rate(schedule, base, step, total) for step in steps]


def test_rsqrt_is_that_of_long_range_arena():
    # Text: base 5e-2 and 8000 steps of warm-up peak at 5.59e-4.
    first, half, peak, later = rates("rsqrt", 8000, [1, 4000, 8000, 20_000])
    assert first == pytest.approx(0.05 / 8000 / 8000**0.5)
    assert half == pytest.approx(0.5 * 0.05 / 89.4427191)
    assert peak == pytest.approx(5.59017e-4, rel=1e-5)
    assert later == pytest.approx(0.05 / 141.421356)


def test_rsqrt_without_warmup():
    assert rates("rsqrt", 0, [1, 4]) == pytest.approx([0.05, 0.025])


def test_cosine():
    values = rates("cosine", 100, [50, 100, 600, 1100], base=1.0, total=1100)
    assert values == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_constant():
    assert rates("constant", 0, [1, 500]) == [0.05, 0.05]
    assert rates("constant", 10, [1, 5, 10, 11]) == pytest.approx([0.005, 0.025, 0.05, 0.05])
