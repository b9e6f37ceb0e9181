"""Comparisons see what is impossible before the first run; the rest is typed in tests/test_cli.py."""

import pytest

import klformer
from klformer.experiments.compare import check_model
from klformer.experiments.config import AttentionConfig
from klformer.experiments.presets import preset


@pytest.mark.parametrize("name", klformer.attention_names())
def test_every_model_can_be_checked_without_its_memory(name):
    check_model(preset("paper", "listops", AttentionConfig(name=name)))


def test_an_impossible_model_is_named():
    with pytest.raises(ValueError, match="multiple of num_components=2, got 7"):
        check_model(preset("paper", "listops", AttentionConfig.parse("gmm-rks:num_frequencies=7")))
