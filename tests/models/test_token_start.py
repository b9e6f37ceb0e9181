"""Tokens that are amounts: vectors of neighbouring numbers are alike at the start."""

import pytest
import torch

from klformer.models import AttentionSpec, InputShape, ModelConfig, build_classifier, build_masked
from klformer.models.embeddings import SequenceEmbedding, ordered_start

DIM = 8_191


def test_products_are_a_gaussian_kernel_of_the_amounts():
    torch.manual_seed(0)
    vectors, amounts = ordered_start(37, DIM).double(), torch.linspace(-1, 1, 37, dtype=torch.float64)
    products = vectors @ vectors.T / DIM
    expected = torch.exp(-4.5 * (amounts.unsqueeze(1) - amounts).square())
    # A product of two entries, 2 cos(a) cos(b), has a deviation of at most sqrt(3/2): four standard errors of the mean.
    assert (products - expected).abs().max() < 4 * 1.5**0.5 / DIM**0.5


def test_entries_have_the_size_of_independent_ones():
    torch.manual_seed(0)
    for token_start in ("independent", "ordered"):
        embedding = SequenceEmbedding(model_dim=512, max_len=3, vocab_size=256, token_start=token_start)
        assert embedding.inputs.weight.square().mean().item() == pytest.approx(1, abs=0.1)
        assert embedding.inputs.weight.requires_grad


def test_neighbouring_tokens_start_alike_in_a_model_and_others_do_not():
    torch.manual_seed(0)
    config = ModelConfig(token_start="ordered", model_dim=64, num_layers=1)
    model = build_classifier(config, AttentionSpec(name="gmm-prf"), InputShape(5, vocab_size=256), num_outputs=2)
    weight = model.embedding.inputs.weight
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(weight[100], weight[101], dim=0) > 0.99
    assert cosine(weight[0], weight[255], dim=0).abs() < 0.5


def test_a_mask_is_no_amount():
    torch.manual_seed(0)
    config = ModelConfig(token_start="ordered", model_dim=512, num_layers=1)
    spec = AttentionSpec(name="gmm-prf")
    weight = build_masked(config, spec, InputShape(max_len=5), counts=torch.ones(257)).embedding.inputs.weight
    cosines = torch.nn.functional.cosine_similarity(weight[:-1], weight[-1:], dim=1)
    assert cosines.abs().max() < 0.3  # independent vectors: 1 / sqrt(512) is one deviation
    assert torch.nn.functional.cosine_similarity(weight[254], weight[255], dim=0) > 0.99


def test_vectors_have_no_order():
    with pytest.raises(ValueError, match="token_start must be independent where inputs are vectors, got ordered"):
        SequenceEmbedding(model_dim=8, max_len=3, input_dim=2, token_start="ordered")
    with pytest.raises(ValueError, match="token_start must be one of 'independent', 'ordered', got 'sorted'"):
        SequenceEmbedding(model_dim=8, max_len=3, vocab_size=2, token_start="sorted")
