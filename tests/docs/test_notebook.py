"""The notebook runs from its first cell to its last, prints what it shows, and has its pictures inside."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def cells():
    """The code cells, each with its source, the text that it shows and the number of its pictures."""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            shown = [output for output in cell["outputs"] if output["output_type"] == "stream"]
            pictures = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
            yield "".join(cell["source"]), "".join("".join(output["text"]) for output in shown), len(pictures)


def test_it_runs_and_shows_what_it_prints_and_draws(home, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(plt, "show", lambda: None)
    names = {"__name__": "__main__"}
    for number, (source, shown, pictures) in enumerate(cells(), start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"cell {number}", "exec"), names)
        assert printed.getvalue() == shown, f"cell {number}"
        assert len(plt.get_fignums()) == pictures, f"cell {number}"
        plt.close("all")
    softmax, fixed, learned = names["kept"].values()
    assert learned > softmax - 0.05
    assert fixed < learned - 0.3


def test_it_is_small():
    assert NOTEBOOK.stat().st_size < 300_000
