"""The first inputs of every target of the fuzzer; `python tests/fuzz/fuzz.py` goes on for as long as one likes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fuzz import TARGETS, fuzz


@pytest.mark.parametrize("name", TARGETS)
def test_nearly_right_inputs_are_read_or_refused_in_words(name, tmp_path):
    counts, crashes, _, _ = fuzz(name, tmp_path, inputs=60)
    assert crashes == {}
    assert counts["refused"] > 5


@pytest.mark.parametrize(
    ("name", "number"),
    [("own", 961), ("commands", 321), ("tables", 1080), ("tables", 10176), ("plugins", 76), ("plugins", 4242)],
)
def test_what_has_crashed_once_does_not_again(name, number, tmp_path):
    assert fuzz(name, tmp_path, first=number, inputs=1)[1] == {}
