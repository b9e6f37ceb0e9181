"""Comparisons see what is impossible before the first run; the rest is typed in tests/cli."""

import pytest

import klformer
from klformer.models import AttentionSpec
from klformer.runs.compare import check_model
from klformer.runs.presets import preset


@pytest.mark.parametrize("name", klformer.attention_names())
def test_every_model_can_be_checked_without_its_memory(name):
    check_model(preset("paper", "listops", AttentionSpec(name=name)))


def test_an_impossible_model_is_named():
    with pytest.raises(ValueError, match="multiple of num_components=2, got 7"):
        check_model(preset("paper", "listops", AttentionSpec.parse("gmm-rks:num_frequencies=7")))
