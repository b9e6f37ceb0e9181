"""The report that is kept in research/ is what can be made again of the runs that are kept with them."""

import re

import pytest

from research import publish

#: When it was made, and figures, whose letters differ between versions of matplotlib; the tables have their numbers.
BY_CHANCE = re.compile(r"Made .*? UTC|<svg.*?</svg>", re.DOTALL)


@pytest.fixture(scope="module")
def kept():
    return publish.kept()


def test_it_is_of_all_runs_that_are_kept(kept, tmp_path):
    publish.unpack(tmp_path)
    names = {path.name for archive in tmp_path.iterdir() for path in archive.iterdir()}
    assert {run.name for run in kept.runs} == names
    assert not kept.damaged
    assert not kept.left_out


def test_it_is_what_these_runs_say(kept):
    published = publish.REPORT.read_text(encoding="utf-8")
    assert BY_CHANCE.sub("", published) == BY_CHANCE.sub("", publish.page(kept)), "make evidence makes it again"


def test_it_can_be_mailed():
    assert publish.REPORT.stat().st_size < 5e6
