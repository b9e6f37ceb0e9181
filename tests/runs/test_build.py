"""The model of a run: its weights for a seed are what they have always been."""

import json
from pathlib import Path

import pytest
import torch

from klformer.models import AttentionSpec
from klformer.runs.build import build_model
from klformer.runs.presets import preset
from klformer.tasks import build_task

#: By preset: of every parameter its shape and the sum of its values for the seed 7.
RECORDED = json.loads((Path(__file__).parent / "weights.json").read_text())


@pytest.mark.parametrize("of", RECORDED)
def test_a_seed_gives_the_weights_that_it_has_always_given(of):
    task, attention = of.split()
    config = preset("laptop", task, AttentionSpec(name=attention))
    torch.manual_seed(7)
    parameters = dict(build_model(config, build_task(config.task, config.data)).named_parameters())
    assert list(parameters) == list(RECORDED[of])
    for name, (shape, total) in RECORDED[of].items():
        assert list(parameters[name].shape) == shape, name
        assert parameters[name].double().sum().item() == pytest.approx(total, rel=1e-9, abs=1e-12), name
