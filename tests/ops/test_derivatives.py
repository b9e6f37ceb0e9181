"""Derivatives of the product that are not its backward: forward mode, torch.func's transforms, gradients of gradients.

The oracle is the definition, `backend="reference"`, in float64, and finite differences.
"""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad, gradgradcheck
from torch.autograd.functional import jvp as jvp_by_double_backward

import klformer
from klformer.models import EncoderConfig
from klformer.ops.envelopes import gaussian_envelope, simplex_envelope

MAPS = ("rks", "prf", "elu")
#: Longer than a chunk of the causal product, and no multiple of it.
LENGTH = 37


def problem(feature_map, *, length=LENGTH, batch=2, seed=0):
    """Differentiable operands, and a function of them; some keys are not there, and all of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    operands = {name: normal(batch, 2, length, size) for name, size in (("q", 3), ("k", 3), ("v", 5))}
    operands["key_bias"] = normal(batch, 1, length)
    if feature_map != "elu":
        operands |= {"omega": normal(2, 4, 3), "frequency_bias": normal(1, 4)}
    if feature_map == "rks":
        operands |= {"pair_offset": normal(2, 3), "smoothing": 0.05 + 0.1 * normal(2).abs()}
    key_mask = torch.rand(batch, length, generator=generator) < 0.8
    key_mask[0, :3] = False
    key_mask[1] = False

    def product(*tensors, causal, backend="auto"):
        named = {"omega": None} | dict(zip(operands, tensors, strict=True))
        return klformer.spectral_product(
            **named, feature_map=feature_map, key_mask=key_mask, causal=causal, backend=backend
        )

    return list(operands.values()), product


cases = pytest.mark.parametrize("causal", [False, True])
maps = pytest.mark.parametrize("feature_map", MAPS)


@maps
@cases
def test_forward_mode(feature_map, causal):
    operands, product = problem(feature_map)
    tangents = tuple(torch.randn_like(x) for x in operands)
    value, derivative = torch.func.jvp(partial(product, causal=causal), tuple(operands), tangents)
    oracle = partial(product, causal=causal, backend="reference")
    torch.testing.assert_close(value, oracle(*operands), rtol=1e-10, atol=1e-10)
    expected = jvp_by_double_backward(oracle, tuple(operands), tangents)[1]
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(derivative, expected, rtol=1e-9, atol=1e-9)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(operands, tangents, strict=True)]
        found = forward_ad.unpack_dual(product(*duals, causal=causal)).tangent
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@maps
@pytest.mark.parametrize("length", [1, 32, 37, 200])
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_the_causal_product_in_plain_operations_is_exact(feature_map, length, spread):
    """Also where keys and log-weights are so far apart that nothing may refer to the largest of all."""
    operands, product = problem(feature_map, length=length)
    operands = [spread * x if number in (1, 3) else x for number, x in enumerate(operands)]  # k and key_bias
    with torch.no_grad():
        found = torch.func.vmap(partial(product, causal=True))(*(x[None] for x in operands))[0]
        torch.testing.assert_close(found, product(*operands, causal=True, backend="reference"), rtol=1e-9, atol=1e-9)


@maps
@cases
def test_gradients_of_gradients(feature_map, causal):
    operands, product = problem(feature_map, length=4)
    leaves = [x.requires_grad_() for x in operands]
    assert gradgradcheck(partial(product, causal=causal), leaves, fast_mode=True)


@maps
@cases
def test_one_more_batch_axis(feature_map, causal):
    several = [problem(feature_map, seed=seed, length=5)[0] for seed in range(3)]
    product = partial(problem(feature_map, length=5)[1], causal=causal)
    stacked = [torch.stack(tensors) for tensors in zip(*several, strict=True)]
    expected = torch.stack([product(*operands) for operands in several])
    torch.testing.assert_close(torch.func.vmap(product)(*stacked), expected, rtol=1e-10, atol=1e-10)


@maps
@cases
def test_gradients_of_torch_func(feature_map, causal):
    operands, product = problem(feature_map, length=5)

    def loss(*tensors):
        return product(*tensors, causal=causal).square().sum()

    places = tuple(range(len(operands)))
    leaves = [x.clone().requires_grad_() for x in operands]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, places)(*operands), expected, rtol=1e-9, atol=1e-9)
    reverse = torch.func.jacrev(partial(product, causal=causal))(*operands)
    forward = torch.func.jacfwd(partial(product, causal=causal))(*operands)
    torch.testing.assert_close(reverse, forward, rtol=1e-9, atol=1e-9)


@maps
def test_several_gradients_at_once(feature_map):
    operands, product = problem(feature_map, length=5)
    q = operands[0].requires_grad_()
    out = product(*operands, causal=False)
    basis = torch.randn(3, *out.shape, dtype=out.dtype)
    (together,) = torch.autograd.grad(out, q, basis, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, q, row, retain_graph=True)[0] for row in basis]
    torch.testing.assert_close(together, torch.stack(one_by_one), rtol=1e-9, atol=1e-9)


def encoder(attention, **config):
    torch.manual_seed(0)
    sizes = {"model_dim": 8, "num_layers": 2, "num_heads": 2, "ffn_dim": 8, "dropout": 0.0}
    return klformer.TransformerEncoder(EncoderConfig(attention=attention, **sizes, **config)).double().eval()


LINEAR = (
    *("gmm-rks:num_frequencies=8", "fastfood-prf:num_frequencies=8", "generative-prf:num_frequencies=8"),
    *("gmm-prf:num_frequencies=8,envelope=simplex", "linear-elu"),
)


@pytest.mark.parametrize("attention", LINEAR)
def test_a_whole_encoder_in_forward_mode_and_by_example(attention):
    model = encoder(attention)
    x, direction = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    derivative = torch.func.jvp(model, (x,), (direction,))[1]
    step = 1e-6
    with torch.no_grad():
        difference = (model(x + step * direction) - model(x - step * direction)) / (2 * step)
    torch.testing.assert_close(derivative, difference, rtol=1e-6, atol=1e-7)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, one):
        return torch.func.functional_call(model, weights, (one[None],)).square().sum()

    by_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for number, one in enumerate(x):
        model.zero_grad()
        loss(dict(model.named_parameters()), one).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(by_example[name][number], parameter.grad, rtol=1e-8, atol=1e-9)


def test_gradients_of_gradients_of_an_envelope():
    x, omega = torch.randn(2, 2, 5, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    mask = torch.rand(2, 1, 5) < 0.7
    assert gradgradcheck(partial(simplex_envelope, key_mask=mask), [x.requires_grad_(), omega.requires_grad_()])
    assert gradgradcheck(partial(gaussian_envelope, coefficient=0.5, key_mask=mask), [x])


@pytest.mark.parametrize("name", klformer.attention_names())
def test_every_attention_runs_on_tensors_without_memory(name):
    with torch.device("meta"):
        attention = klformer.build_attention(name, num_heads=2, head_dim=8, max_len=64)
        q, k, v = (torch.empty(3, 2, 64, 8) for _ in range(3))
        assert attention(q, k, v).shape == (3, 2, 64, 8)


@pytest.mark.parametrize("name", klformer.attention_names())
def test_every_attention_has_forward_derivatives(name):
    attention = klformer.build_attention(name, num_heads=2, head_dim=8, max_len=64).double().eval()
    q, k, v, direction = torch.randn(4, 1, 2, 64, 8, dtype=torch.float64)
    derivative = torch.func.jvp(lambda q, v: attention(q, k, v), (q, v), (direction, direction))[1]
    step = 1e-6
    with torch.no_grad():
        ends = [attention(q + sign * step * direction, k, v + sign * step * direction) for sign in (1, -1)]
    torch.testing.assert_close(derivative, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)
