"""The paper's presets build exactly the paper's models: names and shapes of all that a state dict holds, and what a
model with given weights gives, written down before kernels had options of their own."""

import hashlib
import json

import pytest
import torch

from klformer.lab.runs.config import build_model, preset, preset_names
from klformer.lab.tasks import TASKS, build_task
from klformer.models import AttentionSpec, InputShape, build_classifier

#: Checksum of names and shapes, and the first three outputs of the sparsity task's model.
MODELS = {
    "gmm-rks": ("dba98010f130", [-0.10661, 0.20171, 0.09717]),
    "fastfood-rks": ("20e115fe8f26", [-0.33707, -0.54263, 0.16108]),
    "generative-rks": ("b6e40e2a6f2f", [-0.29559, -0.24363, 0.3125]),
    "gmm-prf": ("dc15ec4fcccf", [0.2713, -0.01077, 0.06211]),
    "fastfood-prf": ("20e115fe8f26", [-0.31996, -0.50506, 0.19878]),
    "generative-prf": ("b6e40e2a6f2f", [-0.1489, -0.1507, 0.35097]),
}
#: Checksums of names and shapes for the kernels above, in that order.
SHAPES = {
    "listops": "3fc050a64473 f05edc3614e6 504dba7ad1e6 2a145ade3b51 f05edc3614e6 f7e2a593f492",
    "text": "24c9744ac4ba c55dade7fb34 5c6948e384c8 794d3e490170 c55dade7fb34 d3435a4f857f",
    "retrieval": "e490114f790b ac7fb0fdcf6e f865c5a1cd50 42086abbbe76 ac7fb0fdcf6e 9968a91cc7d1",
    "image": "8bb25b2fab4f b8255b26b296 463057d56b28 76f017012e24 b8255b26b296 a0d9d5ce3c75",
    "sparsity": "dba98010f130 20e115fe8f26 b6e40e2a6f2f dc15ec4fcccf 20e115fe8f26 b6e40e2a6f2f",
}
#: The same for GLUE and the corpus before it, whose tokens and classes come with data: with 30,522 and 2 of them.
OF_TEXTS = "eecbb6d3d6c4 526b3d738234 32d6c851a8f3 a6d6886e1039 526b3d738234 32d6c851a8f3"


def checksum_of(model):
    """Of names and shapes of all that its state dict holds."""
    described = json.dumps([[key, list(value.shape)] for key, value in model.state_dict().items()])
    return hashlib.sha256(described.encode()).hexdigest()[:12]


@pytest.mark.parametrize("task", SHAPES)
def test_the_papers_models_have_the_shapes_that_they_had(task):
    found = []
    for name in MODELS:
        config = preset("paper", task, AttentionSpec(name=name))
        with torch.device("meta"):
            found.append(checksum_of(build_model(config, build_task(config.task, config.data))))
    assert found == SHAPES[task].split()


def test_the_papers_models_of_texts_have_the_shapes_that_they_had():
    tasks = [task for task in TASKS if "paper" in preset_names(task) and task not in SHAPES]
    assert len(tasks) == 10
    for name, expected in zip(MODELS, OF_TEXTS.split(), strict=True):
        configs = [preset("paper", task, AttentionSpec(name=name)) for task in tasks]
        described = {(config.model.model_dump_json(), json.dumps(config.attention.options)) for config in configs}
        assert len(described) == 1, "one model for all"
        config = configs[0]
        shape = InputShape(max_len=config.data.max_len, vocab_size=30_522)
        with torch.device("meta"):
            assert checksum_of(build_classifier(config.model, config.attention, shape, num_outputs=2)) == expected, name


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_models_are_what_they_were(name):
    config = preset("paper", "sparsity", AttentionSpec(name=name))
    torch.manual_seed(0)
    model = build_model(config, build_task(config.task, config.data)).eval()
    inputs = torch.randint(0, 2, (1, 40, 3), generator=torch.Generator().manual_seed(1)).float()
    with torch.no_grad():
        outputs = model(inputs)[0, :3]
    checksum, expected = MODELS[name]
    assert checksum_of(model) == checksum
    torch.testing.assert_close(outputs, torch.tensor(expected), atol=2e-5, rtol=0)
