"""The scripts of examples/ run as they stand, and show what they say."""

import runpy
from pathlib import Path

import pytest

from klformer.attention.registry import ATTENTIONS
from klformer.kernels import SPECTRA
from klformer.lab.tasks import TASKS

EXAMPLES = Path(__file__).parent.parent / "examples"
#: What a script prints if it shows what it is for.
SHOWS = {
    "convert_model": ["loaded again, bit for bit: True"],
    "drop_in_attention": ["the same outputs up to", "padding that is NaN changes nothing: True"],
    "learn_a_kernel": ["step 300: relative error 0.000"],
    "merge_states": ["france is ... paris (", "river is ... shallow ("],
    "own_kernel": ["distance 1: estimated 0.50", "widths have gradients: True"],
    "own_table": ["the cast is moving,good", "a scene is dull,bad"],
    "own_task": ["test: 500 examples, accuracy"],
    "stream_tokens": ["after 1, 100 and 200 tokens: 9,216, 9,216, 9,216"],
}
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def _own_registries(monkeypatch):
    """What a script registers is gone after the test."""
    for registry in (ATTENTIONS, SPECTRA, TASKS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.usefixtures("_own_registries")
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_and_shows_its_point(name, home, capsys):
    if name == "convert_model":
        pytest.importorskip("transformers")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.strip()
    for line in SHOWS.get(name, []):
        assert line in shown
    assert not list(home.iterdir()), "an example leaves nothing behind"


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_are_short_and_listed(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) < 60
    assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text()
