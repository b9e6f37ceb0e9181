"""A product by pairs and one through a state are the same, alone and beside near keys."""

import random

import pytest
import torch

from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.near import near_attention
from klformer.ops.spectral_product import BACKENDS, Call, SpectralKernel
from klformer.ops.spectral_product.chunked import ChunkedBackend, pairs

HEADS, WIDTH, VALUES, FREQUENCIES = 2, 5, 3, 6


def some(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def call_of(choose, feature_map, *, batch, queries, keys, causal=False):
    """A call with some of all options."""
    given = {} if feature_map == "elu" else {"omega": some(choose.choice([1, HEADS]), FREQUENCIES, WIDTH)}
    if feature_map != "elu" and choose.random() < 0.5:
        given["frequency_bias"] = some(choose.choice([1, HEADS]), FREQUENCIES)
    if feature_map == "rks":
        # Without smoothing a denominator may be close to 0.
        given["smoothing"] = torch.rand(HEADS, dtype=torch.float64).add(0.5).requires_grad_()
        if choose.random() < 0.5:
            given["pair_offset"] = some(choose.choice([1, HEADS]), WIDTH)
    if feature_map == "prf":
        given |= {"simplex": choose.random() < 0.4, "norm_coefficient": choose.choice([0.0, 0.3])}
    rows = choose.choice([1, batch]), choose.choice([1, HEADS]), keys
    return Call(
        "causal" if causal else "product",
        SpectralKernel(FEATURE_MAPS[feature_map], **given),
        q=some(batch, HEADS, queries, WIDTH),
        k=some(batch, HEADS, keys, WIDTH),
        v=some(batch, HEADS, keys, VALUES),
        key_mask=torch.rand(rows) > 0.3 if choose.random() < 0.5 else None,
        key_bias=some(*rows) if choose.random() < 0.5 else None,
    )


def with_gradients(call, results):
    """The result and log-sums, and the gradients of a sum of both."""
    out, log_sum = results
    finite = log_sum.masked_fill(~log_sum.isfinite(), 0)
    torch.manual_seed(1)
    loss = sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in (out, finite))
    wanted = [x for x in call.tensors().values() if x is not None and x.requires_grad]
    return [out, finite, *torch.autograd.grad(loss, wanted, materialize_grads=True)]


@pytest.fixture(params=[True, False], ids=["pairs", "state"])
def way(request, monkeypatch):
    monkeypatch.setattr(pairs, "serves", lambda call: request.param)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("seed", range(12))
def test_both_ways_are_the_definition(way, feature_map, seed):
    torch.manual_seed(seed)
    choose = random.Random(seed)
    sizes = {"batch": choose.choice([1, 3]), "queries": choose.choice([1, 1, 7]), "keys": choose.choice([0, 1, 9, 40])}
    call = call_of(choose, feature_map, **sizes)
    backend = ChunkedBackend(chunk=choose.choice([None, 1, 7]))
    backend.name = "chunked"
    expected = with_gradients(call, BACKENDS["reference"].product(call))
    for found, wanted in zip(with_gradients(call, backend.product(call)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("feature_map", ["prf", "elu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_one_node_with_near_keys_gives_what_two_give(way, feature_map, causal, seed):
    torch.manual_seed(seed)
    call = call_of(random.Random(seed), feature_map, batch=2, queries=23, keys=23, causal=causal)
    offset, mask = some(HEADS, 1), torch.rand(2, 23) > 0.2
    given = {"window": 3, "causal": causal, "key_mask": mask, "far_offset": offset}
    chosen = BACKENDS["chunked"]
    out, log_sum = chosen.causal(call)[:2] if causal else chosen.product(call)
    norms = call.kernel.norm_coefficient * call.q.square().sum(-1)
    two = near_attention(call.q, call.k, call.v, far=(out, log_sum - norms), **given)
    one = near_attention(call.q, call.k, call.v, far=call, backend="chunked", **given)
    for found, wanted in zip(with_gradients(call, one), with_gradients(call, two), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
