"""Figures of the report: what stands where, before it becomes SVG."""

import itertools

import pytest
from matplotlib import pyplot as plt

from klformer.experiments.report.drawing import Artist, look
from klformer.experiments.report.figures import draw_variance


class Keeper(Artist):
    """Keeps figures open in place of writing them."""

    def __init__(self, attentions=()):
        super().__init__(None, attentions)
        self.kept = []

    def finish(self, figure, name, title, caption):
        self.kept.append(figure)
        figure.draw_without_rendering()


@pytest.fixture
def keeper():
    keeper = Keeper()
    yield keeper
    for figure in keeper.kept:
        plt.close(figure)


def boxes(artists):
    return [artist.get_window_extent() for artist in artists if artist.get_visible()]


#: As measured on Text, and further apart.
GAINS = [(0.99504, 0.99824, 1.00470), (1.0, 1.0, 1.11220), (0.5, 0.9), (1.0, 1.0)]


@pytest.mark.parametrize("gains", GAINS)
def test_figures_of_voting_gain_can_be_read(keeper, gains):
    rows = [
        {"run": f"run{n}", "attention": f"a{n}", "rsd": 0.1, "pi": 12.5, "agv": agv, "voting_accuracy": 0.6}
        for n, agv in enumerate(gains)
    ]
    draw_variance(keeper, "text", "Text", rows, "")
    (figure,) = keeper.kept
    with look("test"):
        for axes in figure.axes:
            bars, labels = boxes(axes.patches), boxes(axes.texts)
            assert not any(bar.overlaps(label) for bar in bars if bar.width > 0 for label in labels)
            assert all(axes.bbox.x0 - 1 <= label.x0 and label.x1 <= axes.bbox.x1 + 6 for label in labels)
            ticks = [box for tick in axes.xaxis.get_major_ticks() for box in boxes([tick.label1]) if box.width]
            assert len(ticks) >= 2
            assert all(left.x1 + 2 < right.x0 for left, right in itertools.pairwise(ticks))
    gain = next(axes for axes in figure.axes if axes.get_title() == "AGV")
    assert [text.get_text() for text in gain.texts] == [f"{agv:.4f}"[:6] if agv < 1 else f"{agv:.3f}" for agv in gains]
