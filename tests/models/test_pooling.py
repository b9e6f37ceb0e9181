"""From a sequence to one vector: CLS, or the mean over its tokens."""

import pytest
import torch
from support import small_options

import klformer
from klformer.lab.training.reuse import first_part_once
from klformer.models import AttentionSpec, InputShape, ModelConfig, build_classifier
from klformer.models.pooling import masked_mean
from klformer.noise import resample

BATCH, LENGTH = 3, 9


def model(name="gmm-prf", *, is_pair=False, num_outputs=4, **sizes):
    chosen = {"pooling": "mean", "dropout": 0.0, "model_dim": 12, "num_heads": 3, "head_dim": 4, "ffn_dim": 7}
    attention = AttentionSpec(name=name, options=small_options(name))
    shape = InputShape(max_len=20, vocab_size=11, is_pair=is_pair)
    return build_classifier(ModelConfig(**chosen | sizes), attention, shape, num_outputs=num_outputs).double()


def half_masked():
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [4], [0]])


def test_the_mean_is_over_real_tokens_and_that_of_none_is_zero():
    x = torch.randn(BATCH, LENGTH, 5, dtype=torch.float64)
    x[1, 4:] = torch.inf
    x[2] = torch.nan
    x.requires_grad_()
    mean = masked_mean(x, half_masked())
    torch.testing.assert_close(mean[0], x[0].mean(0))
    torch.testing.assert_close(mean[1], x[1, :4].mean(0))
    assert mean[2].eq(0).all()
    mean.sum().backward()
    assert torch.equal(x.grad != 0, half_masked().unsqueeze(-1).expand_as(x))
    torch.testing.assert_close(x.grad[1, 0], torch.full((5,), 0.25, dtype=torch.float64))


def test_without_a_mask_all_tokens_count():
    x = torch.randn(BATCH, LENGTH, 5)
    torch.testing.assert_close(masked_mean(x), x.mean(1))
    assert masked_mean(x[:, :0]).eq(0).all()


@pytest.mark.parametrize("name", klformer.attention_names())
@pytest.mark.parametrize("is_pair", [False, True])
def test_padding_and_empty_sequences_do_no_harm(name, is_pair):
    classifier = model(name, is_pair=is_pair)
    assert classifier.embedding.cls_token is None
    inputs, key_mask = torch.randint(1, 11, (BATCH, LENGTH)), half_masked()
    given = (inputs, inputs, key_mask, key_mask) if is_pair else (inputs, key_mask)
    scores = classifier(*given)
    assert scores.shape == (BATCH, 4)
    alone = classifier(*(inputs[1:2, :4],) * (2 if is_pair else 1))
    torch.testing.assert_close(scores[1:2], alone, atol=1e-10, rtol=1e-10)
    scores.square().sum().backward()
    assert scores.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in classifier.parameters())


def test_the_head_sees_the_mean_of_the_encoder():
    classifier, seen = model(), []
    classifier.head[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    inputs = torch.randint(1, 11, (BATCH, LENGTH))
    classifier(inputs)
    x, _ = classifier.embedding(inputs)
    torch.testing.assert_close(seen[0], classifier.encoder(x).mean(1))


def test_the_longest_sequence_is_one_token_longer_with_cls():
    assert ModelConfig(pooling="cls").encoder(AttentionSpec(name="softmax"), max_len=20).max_len == 21
    assert ModelConfig(pooling="mean").encoder(AttentionSpec(name="softmax"), max_len=20).max_len == 20
    assert model("linformer")(torch.ones(1, 20, dtype=torch.long)).shape == (1, 4)


@pytest.mark.parametrize("is_pair", [False, True])
def test_a_regression_has_one_output(is_pair):
    inputs = torch.ones(BATCH, 5, dtype=torch.long)
    assert model(is_pair=is_pair, num_outputs=1)(*(inputs,) * (2 if is_pair else 1)).shape == (BATCH, 1)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("is_pair", [False, True])
@torch.no_grad()
def test_passes_with_other_noise_share_their_first_part(pooling, positions, is_pair):
    classifier = model(is_pair=is_pair, pooling=pooling, positions=positions).eval()
    first, second = torch.randint(1, 11, (2, BATCH, LENGTH))
    given = (first, second, half_masked(), None) if is_pair else (first, half_masked())

    def draws():
        for seed in range(3):
            resample(classifier, torch.Generator().manual_seed(seed))
            yield classifier(*given)

    expected = list(draws())
    calls = []
    handle = classifier.embedding.inputs.register_forward_hook(lambda *_: calls.append(1))
    with first_part_once(classifier) as next_pass:
        for scores, wanted in zip(draws(), expected, strict=True):
            assert torch.equal(scores, wanted)
            next_pass()
    handle.remove()
    assert len(calls) == 1 + is_pair
