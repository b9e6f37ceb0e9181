"""The figures of README and concept pages can be drawn again from what is in the repository."""

import runpy
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from klformer.plotting import COLOURS, WIDE

DOCS = Path(__file__).parents[2] / "docs"
DRAW = runpy.run_path(str(DOCS / "draw.py"))


@pytest.mark.parametrize("name", DRAW["DRAWINGS"])
def test_a_figure_can_be_drawn_and_is_there(name):
    figure = DRAW["DRAWINGS"][name]()
    try:
        assert figure.axes
        sizes = [text.get_fontsize() for axes in figure.axes for text in axes.texts + axes.get_xticklabels()]
        assert min(sizes, default=11) >= 9, "it is to be read at half of its size"
    finally:
        plt.close(figure)
    assert (DOCS / "figures" / f"{name}.png").exists()


@pytest.mark.parametrize("name", DRAW["DRAWINGS"])
def test_a_figure_is_no_wider_than_a_page(name):
    figure = DRAW["DRAWINGS"][name]()
    width = figure.get_figwidth()
    plt.close(figure)
    assert width <= WIDE


def test_bars_of_the_overview_are_told_apart_by_everybody():
    figure = DRAW["overview"]()
    colours = {patch.get_facecolor() for patch in figure.axes[0].patches}
    plt.close(figure)
    assert colours <= {plt.matplotlib.colors.to_rgba(colour) for colour in COLOURS}
