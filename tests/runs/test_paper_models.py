"""The paper's presets build exactly the paper's models: names and shapes of all that a state dict holds, and what a
model with given weights gives, written down before kernels had options of their own."""

import hashlib
import json

import pytest
import torch

from klformer.models import AttentionSpec
from klformer.runs.build import build_model
from klformer.runs.presets import preset
from klformer.tasks import build_task

#: Checksum of names and shapes, and the first three outputs of the sparsity task's model.
MODELS = {
    "gmm-rks": ("dba98010f130", [-0.10661, 0.20171, 0.09717]),
    "fastfood-rks": ("20e115fe8f26", [-0.33707, -0.54263, 0.16108]),
    "generative-rks": ("b6e40e2a6f2f", [-0.29559, -0.24363, 0.3125]),
    "gmm-prf": ("dc15ec4fcccf", [0.2713, -0.01077, 0.06211]),
    "fastfood-prf": ("20e115fe8f26", [-0.31996, -0.50506, 0.19878]),
    "generative-prf": ("b6e40e2a6f2f", [-0.1489, -0.1507, 0.35097]),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_models_are_what_they_were(name):
    config = preset("paper", "sparsity", AttentionSpec(name=name))
    torch.manual_seed(0)
    model = build_model(config, build_task(config.task, config.data)).eval()
    described = json.dumps([[key, list(value.shape)] for key, value in model.state_dict().items()])
    inputs = torch.randint(0, 2, (1, 40, 3), generator=torch.Generator().manual_seed(1)).float()
    with torch.no_grad():
        outputs = model(inputs)[0, :3]
    checksum, expected = MODELS[name]
    assert hashlib.sha256(described.encode()).hexdigest()[:12] == checksum
    torch.testing.assert_close(outputs, torch.tensor(expected), atol=2e-5, rtol=0)
