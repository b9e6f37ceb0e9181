"""The model of a run: its weights for a seed are what they have always been."""

import json
from pathlib import Path

import pytest
import torch

from klformer.attention import attention_options
from klformer.lab.runs.config import build_model, preset
from klformer.lab.tasks import build_task
from klformer.models import AttentionSpec

#: By preset: of every parameter its shape and the sum of its values for the seed 7.
RECORDED = json.loads((Path(__file__).parent / "weights.json").read_text())
#: What the presets said when the weights were recorded, and say otherwise now.
FREQUENCIES = {"num_frequencies": 128}
THEN = {
    "listops": {"model": {"pooling": "cls", "convolution_width": 0}},
    "text": {"data": {"max_len": 1024}, "model": {"pooling": "cls", "convolution_width": 0}},
    "retrieval": {"model": {"pooling": "cls", "convolution_width": 0}},
}


@pytest.mark.parametrize("of", RECORDED)
def test_a_seed_gives_the_weights_that_it_has_always_given(of):
    task, attention = of.split()
    options = FREQUENCIES if "num_frequencies" in attention_options(attention) else {}
    config = preset("laptop", task, AttentionSpec(name=attention, options=options))
    sections = {name: getattr(config, name).model_copy(update=then) for name, then in THEN.get(task, {}).items()}
    config = config.model_copy(update=sections)
    torch.manual_seed(7)
    parameters = dict(build_model(config, build_task(config.task, config.data)).named_parameters())
    assert list(parameters) == list(RECORDED[of])
    for name, (shape, total) in RECORDED[of].items():
        assert list(parameters[name].shape) == shape, name
        assert parameters[name].double().sum().item() == pytest.approx(total, rel=1e-9, abs=1e-12), name
