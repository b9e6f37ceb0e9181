"""What is hidden: 15%, in 80/10/10, never a special token, the same for the same draw whatever the batch is."""

import numpy as np
import pytest
import torch

from klformer.errors import ArgumentError
from klformer.lab.data import Examples, Sequences, collate
from klformer.lab.data.sequences import IGNORED
from klformer.lab.training.objectives import MaskedLanguageModelling
from klformer.models import AttentionSpec, InputShape, ModelConfig, build_masked

VOCAB, MASK, SPECIALS = 50, 4, (0, 1, 2)


def objective(**changes):
    sizes = {"vocab_size": VOCAB, "mask": MASK, "specials": SPECIALS, "counts": np.ones(VOCAB, np.int64)}
    return MaskedLanguageModelling(**sizes | changes)


def examples(count=200, seed=0):
    generator = np.random.default_rng(seed)
    rows = [generator.integers(0, VOCAB, generator.integers(1, 80)) for _ in range(count)]
    return Examples(Sequences.from_list(rows), np.zeros(count, np.int64))


def posed(data, indices, draw):
    batch = collate(data, np.asarray(indices))
    return batch, objective().pose(batch, draw)


def test_what_is_hidden():
    data = examples(2000)
    batch, asked = posed(data, np.arange(2000), (3, 7))
    special = torch.isin(batch.inputs, torch.tensor([MASK, *SPECIALS]))
    may_ask = batch.key_mask & ~special
    hidden = asked.targets != IGNORED
    assert not (hidden & ~may_ask).any()
    assert torch.equal(asked.targets[hidden], batch.inputs[hidden])
    assert torch.equal(asked.inputs[~hidden], batch.inputs[~hidden])
    per_row = hidden.sum(1)
    wanted = torch.where(may_ask.any(1), (0.15 * may_ask.sum(1)).round().clamp(min=1), 0)
    assert torch.equal(per_row, wanted.long())
    new, old = asked.inputs[hidden], batch.inputs[hidden]
    count = len(new)
    masked, kept = (new == MASK).float().mean().item(), (new == old).float().mean().item()
    assert abs(masked - 0.8) < 4 * (0.8 * 0.2 / count) ** 0.5
    # A tenth is left, and of the tenth that is replaced one in 46 by itself.
    same = 0.1 + 0.1 / 46
    assert abs(kept - same) < 4 * (same * (1 - same) / count) ** 0.5
    assert not torch.isin(new[new != MASK], torch.tensor(SPECIALS)).any()


def test_a_draw_is_a_function_of_its_numbers_and_the_example_alone():
    data = examples()
    together = posed(data, np.arange(40), (3, 7))[1]
    for part in (np.arange(20), np.arange(20, 40)[::-1]):
        alone = posed(data, part, (3, 7))[1]
        length = alone.inputs.shape[1]
        assert torch.equal(alone.inputs, together.inputs[part.copy(), :length])
        assert torch.equal(alone.targets, together.targets[part.copy(), :length])
    assert not torch.equal(posed(data, np.arange(40), (3, 8))[1].targets, together.targets)
    assert not torch.equal(posed(data, np.arange(40), (4, 7))[1].targets, together.targets)


def test_loss_and_metrics_are_those_of_the_hidden_tokens():
    data = examples(30)
    batch = posed(data, np.arange(30), ())[1]
    hidden = batch.targets != IGNORED
    scores = torch.randn(2, int(hidden.sum()), VOCAB, generator=torch.Generator().manual_seed(0))
    scores[0, :, :].scatter_(1, batch.targets[hidden][:, None], 9.0)
    task = objective()
    losses = task.loss_of(scores, batch)
    wanted = torch.nn.functional.cross_entropy(scores[0], batch.targets[hidden], reduction="sum")
    torch.testing.assert_close(losses[0], wanted)
    predictions = task.predict(scores, batch)
    first, second = (task.measure(predictions[draw], torch.zeros(30)) for draw in (0, 1))
    assert first["masked_accuracy"] == 1.0
    assert abs(first["perplexity"] - np.exp(losses[0].item() / int(hidden.sum()))) < 1e-4
    assert second["masked_accuracy"] == (scores[1].argmax(-1) == batch.targets[hidden]).double().mean().item()
    assert task.count(scores, batch) == hidden.sum()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_fresh_model_knows_the_frequency_of_tokens_and_looks_at_the_right_positions(pooling):
    counts = torch.arange(VOCAB)
    torch.manual_seed(0)
    config = ModelConfig(num_layers=1, num_heads=2, model_dim=8, head_dim=4, ffn_dim=8, dropout=0.0, pooling=pooling)
    model = build_masked(config, AttentionSpec(name="softmax"), InputShape(max_len=80), counts=counts)
    likely = (counts + 1).double() / (counts + 1).sum()
    torch.testing.assert_close(model.head.bias.exp().double(), likely, atol=1e-6, rtol=1e-5)
    data = examples(6)
    batch = posed(data, np.arange(6), ())[1]
    asked = batch.targets != IGNORED
    model.double().eval()
    x, mask = model.embedding(batch.inputs, batch.key_mask)
    every = model.encoder(x, key_mask=mask)[:, int(pooling == "cls") :]
    scores = model.head(every, model.embedding.inputs.weight)
    torch.testing.assert_close(model(batch.inputs, batch.key_mask, asked), scores[asked])


def test_wrong_arguments():
    with pytest.raises(ArgumentError, match="mask must be a token from 0 to 49, got 50"):
        objective(mask=50)
    with pytest.raises(ArgumentError, match="there must be tokens that are not special"):
        objective(specials=range(50))
