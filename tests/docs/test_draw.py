"""The figures of README, docs and research/ are what can be drawn again from what is in the repository."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from PIL import Image

from klformer.lab.plotting import COLOURS, WIDE, save
from research.draw import DRAWINGS, place

#: Of numbers that torch draws at random, which may differ between its versions.
RANDOM = ("concept-kernel", "concept-noise", "near-and-far")
#: Mean difference of the levels, from 0 to 1. One run that is 5% off makes 2e-4 to 2e-3 in lra, variance and gradients.
TOLERANCE = 5e-5


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_figure_can_be_drawn_and_is_there(name):
    figure = DRAWINGS[name]()
    try:
        assert figure.axes
        sizes = [text.get_fontsize() for axes in figure.axes for text in axes.texts + axes.get_xticklabels()]
        assert min(sizes, default=11) >= 9, "it is to be read at half of its size"
    finally:
        plt.close(figure)
    assert place(name).exists()


@pytest.mark.parametrize("name", [name for name in DRAWINGS if name not in RANDOM])
def test_a_figure_is_as_its_data_says(tmp_path, name):
    kept = Image.open(place(name))
    if f"version{mpl.__version__}," not in kept.text["Software"]:
        pytest.skip(
            f"drawn by another version than {mpl.__version__}, whose letters may differ: {kept.text['Software']}"
        )
    save(DRAWINGS[name](), tmp_path / "new.png")
    old, new = (np.asarray(image.convert("RGB"), float) / 255 for image in (kept, Image.open(tmp_path / "new.png")))
    assert old.shape == new.shape
    assert np.abs(old - new).mean() < TOLERANCE, "make figures draws it again"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_figure_is_no_wider_than_a_page(name):
    figure = DRAWINGS[name]()
    width = figure.get_figwidth()
    plt.close(figure)
    assert width <= WIDE


def test_bars_of_the_overview_are_told_apart_by_everybody():
    figure = DRAWINGS["overview"]()
    colours = {patch.get_facecolor() for patch in figure.axes[0].patches}
    plt.close(figure)
    assert colours <= {plt.matplotlib.colors.to_rgba(colour) for colour in COLOURS}
