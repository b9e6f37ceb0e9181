"""The convolution over neighbours: its definition, what padding may not do to it, and where it is refused."""

import pytest
import torch

from klformer.models import AttentionSpec, InputShape, ModelConfig, build_classifier
from klformer.models.embeddings import Neighbours, SequenceEmbedding

BATCH, LENGTH, DIM = 3, 11, 5


def sequences():
    return torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)


def classifier(**arguments):
    sizes = ModelConfig(convolution_width=3, dropout=0.0, num_layers=1, positions="none", pooling="mean")
    shape = InputShape(max_len=20, vocab_size=9)
    return build_classifier(sizes, AttentionSpec(name="gmm-prf"), shape, num_outputs=3, **arguments).eval()


@pytest.mark.parametrize("width", [1, 3, 7, 13])
def test_it_is_a_depthwise_convolution(width):
    neighbours, x = Neighbours(model_dim=DIM, convolution_width=width).double(), sequences()
    weight = neighbours.weight.T.unsqueeze(1)  # (D, 1, width)
    expected = torch.nn.functional.conv1d(x.mT, weight, padding=width // 2, groups=DIM).mT
    torch.testing.assert_close(neighbours(x), expected, atol=1e-12, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda y: neighbours(y[:, :4]), x.requires_grad_())


def test_a_mixture_of_inputs_has_their_size():
    torch.manual_seed(0)
    neighbours = Neighbours(model_dim=512, convolution_width=5)
    assert neighbours(torch.randn(4, 64, 512)).std().item() == pytest.approx(1, abs=0.05)


def test_what_the_mask_leaves_out_is_not_seen_and_gets_no_gradient():
    neighbours, x = Neighbours(model_dim=DIM, convolution_width=5).double(), sequences()
    key_mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [1]])
    poisoned = x.masked_fill(~key_mask.unsqueeze(-1), 1e9).requires_grad_()
    mixed = neighbours(poisoned, key_mask)
    torch.testing.assert_close(mixed[1, :7], neighbours(x[1:2, :7])[0], atol=1e-12, rtol=1e-12)
    mixed.sum().backward()
    assert torch.equal(poisoned.grad.ne(0).all(-1), key_mask)


def test_it_tells_orders_apart_where_nothing_else_does():
    model, inputs = classifier(), torch.tensor([[1, 2, 3, 4, 5]])
    assert not torch.allclose(model(inputs), model(inputs[:, [1, 0, 2, 3, 4]]), atol=1e-6)


def test_cls_is_no_neighbour():
    embedding = SequenceEmbedding(model_dim=DIM, max_len=9, vocab_size=7, positions="none", convolution_width=3)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = embedding(tokens)[0]
        embedding.cls_token += 1
        torch.testing.assert_close(embedding(tokens)[0][:, 1:], before[:, 1:])


def test_an_even_width_and_causal_models_are_refused():
    with pytest.raises(ValueError, match="convolution_width must be odd, or 0 for none, got 4"):
        Neighbours(model_dim=DIM, convolution_width=4)
    with pytest.raises(ValueError, match="convolution_width must be 0 in a causal model"):
        classifier(of_positions=True, causal=True)
