"""Contracts on results: precision, gradients, padding, causality, extreme inputs."""

import pytest
import torch

import klformer
from klformer.testing.problems import (
    BATCH,
    HEADS,
    QUERIES,
    VALUE_DIM,
    Operands,
    build,
    half_masked,
    operands,
    problem,
    relative_error,
    small_options,
)
from klformer.testing.subjects import (
    CAUSAL,
    CROSS,
    KERNELS,
    LEARNED,
    NAMES,
    WITH_FREQUENCIES,
    every_direction,
    every_direction_and_variant,
    gradients,
)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_a_kernel_is_what_its_features_say(name, causal, masked):
    # With so much smoothing no mean of a kernel needs to be raised, which features do not show.
    enough = {"smoothing": 1.0} if "smoothing" in klformer.attention_options(name) else {}
    mechanism, x = build(name, **enough), operands(causal=causal)
    num_queries, num_keys = x.q.shape[2], x.k.shape[2]
    key_mask = half_masked(keys=num_keys) if masked else torch.ones(BATCH, num_keys, dtype=torch.bool)
    weights = mechanism.features(x.q, "query") @ mechanism.features(x.k, "key").transpose(-1, -2)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    visible = (visible.tril() if causal else visible) & key_mask[:, None, None]
    weights = weights.masked_fill(~visible, 0)
    expected = weights @ x.v / weights.sum(-1, keepdim=True).masked_fill(~visible.any(-1, keepdim=True), 1)
    actual = mechanism(*x, key_mask=key_mask if masked else None, causal=causal)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_keys_have_log_weights_or_refuse_them(name):
    mechanism, x = problem(name)
    num_keys = x.k.shape[2]
    key_bias = torch.randn(BATCH, HEADS, num_keys, dtype=torch.float64)
    key_bias[:, :, -1] = -torch.inf
    if not mechanism.supports_key_bias:
        with pytest.raises(ValueError, match="key_bias must be None"):
            mechanism(*x, key_bias=key_bias)
        return
    weights = mechanism.features(x.q, "query") @ mechanism.features(x.k, "key").transpose(-1, -2)
    weights = weights * key_bias.exp().unsqueeze(-2)
    expected = weights @ x.v / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(mechanism(*x, key_bias=key_bias), expected, atol=1e-10, rtol=1e-10)
    state = mechanism.absorb(mechanism.initial_state(BATCH), x.k, x.v, key_bias=key_bias)
    torch.testing.assert_close(mechanism.read(state, x.q), expected, atol=1e-10, rtol=1e-10)


@every_direction
def test_float32_is_near_float64(name, causal):
    mechanism, x = problem(name, causal=causal, queries=211, keys=307)
    expected = mechanism(*x, causal=causal)
    actual = mechanism.float()(*(t.float() for t in x), causal=causal)
    assert relative_error(actual, expected) < 1e-5


@every_direction
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_gradients(name, causal, masked):
    # Every number of operands and parameters is perturbed by itself, and every output goes back by itself: few of each.
    few = {"num_frequencies": 6} if name in WITH_FREQUENCIES else small_options(name)
    few |= {"noise_dim": 2, "hidden_dims": (3, 2)} if name.startswith("generative") else {}
    mechanism = klformer.build_attention(name, num_heads=2, head_dim=3, value_dim=2, max_len=8, **few).double()
    queries, keys, batch = 5, 4 if mechanism.supports_cross and not causal else 5, 2 if masked else 1
    x = Operands(
        *(torch.randn(batch, 2, *shape, dtype=torch.float64) for shape in ((queries, 3), (keys, 3), (keys, 2)))
    )
    x.require_grad()
    key_mask = half_masked(batch=batch, keys=keys) if masked else None
    parameters = tuple(mechanism.parameters())

    def attend(*inputs):
        return mechanism(*inputs[:3], key_mask=key_mask, causal=causal)

    # The parameters are perturbed in place by gradcheck, so that it is enough to name them.
    assert torch.autograd.gradcheck(attend, (*x, *parameters), atol=1e-6)


@every_direction
def test_transforms_give_what_autograd_does(name, causal):
    mechanism, x = problem(name, causal=causal)

    def total(q, v):
        return mechanism(q, x.k, v, causal=causal).square().sum()

    # By the values too, on which every attention depends.
    q, v = x.q.requires_grad_(), x.v.requires_grad_()
    expected = torch.autograd.grad(total(q, v), (q, v), allow_unused=True, materialize_grads=True)
    given = torch.func.grad(total, argnums=(0, 1))(q.detach(), v.detach())
    torch.testing.assert_close(given, expected, atol=1e-10, rtol=1e-10)
    several = torch.func.vmap(total, in_dims=(0, None))(torch.stack([q.detach(), -q.detach()]), v.detach())
    torch.testing.assert_close(several, torch.stack([total(q, v), total(-q, v)]), atol=1e-10, rtol=1e-10)


@every_direction
@pytest.mark.parametrize("poison", [1e9, float("inf"), float("nan")])
def test_padding_cannot_leak(name, causal, poison):
    mechanism, x = problem(name, dtype=torch.float32, causal=causal)
    key_mask = half_masked(keys=x.k.shape[2])
    clean = mechanism(*x, key_mask=key_mask, causal=causal)
    padding = ~key_mask[:, None, :, None]
    x.k, x.v = x.k.masked_fill(padding, poison), x.v.masked_fill(padding, poison)
    kept = torch.ones_like(clean, dtype=torch.bool)
    if mechanism.uses_queries and not mechanism.uses_keys and not mechanism.supports_cross:
        # What is padding as a key is so as a query, whose result nobody looks at.
        x.q, kept = x.q.masked_fill(padding, poison), ~padding.expand_as(clean)
    x.require_grad()
    poisoned = mechanism(*x, key_mask=key_mask, causal=causal)
    assert torch.equal(clean[kept], poisoned[kept])
    poisoned[kept].sum().backward()
    for gradient in gradients(x)[1:]:
        assert gradient[padding.expand_as(gradient)].eq(0).all()
    assert all(g.isfinite().all() for g in gradients(x))


@every_direction_and_variant
def test_nothing_to_attend_to_gives_zero(name, causal):
    mechanism, x = problem(name, dtype=torch.float32, causal=causal)
    x.require_grad()
    key_mask = half_masked(keys=x.k.shape[2])
    key_mask[1] = False
    out = mechanism(*x, key_mask=key_mask, causal=causal)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    out.square().sum().backward()
    assert all(g.isfinite().all() for g in gradients(x) + [p.grad for p in mechanism.parameters()])
    assert all(g[1].eq(0).all() for g in gradients(x))


@every_direction
def test_batch_entries_are_independent(name, causal):
    mechanism, x = problem(name, dtype=torch.float32, causal=causal)
    x.require_grad()
    out = mechanism(*x, causal=causal)
    out[0].sum().backward()
    assert all(g[1].eq(0).all() for g in gradients(x))
    alone = mechanism(*(t[:1] for t in x), causal=causal)
    torch.testing.assert_close(alone, out[:1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_look_ahead(name):
    mechanism, x = problem(name, dtype=torch.float32, causal=True)
    x.require_grad()
    position = 4
    out = mechanism(*x, causal=True)
    out[:, :, position].sum().backward()
    assert all(g[:, :, position + 1 :].eq(0).all() for g in gradients(x))
    with torch.no_grad():
        for t in x:
            t[:, :, position + 1 :] = 1e9
        poisoned = mechanism(*x, causal=True)
    torch.testing.assert_close(poisoned[:, :, : position + 1], out[:, :, : position + 1], atol=1e-5, rtol=1e-5)


@every_direction_and_variant
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("std", [0.0, 1e-3, 32.0, 1e4])
def test_extreme_inputs_stay_finite(name, causal, std, masked):
    mechanism, x = problem(name, dtype=torch.float32, causal=causal, queries=67, std=std)
    key_mask = half_masked(keys=x.k.shape[2]) if masked else None
    x.require_grad()
    out = mechanism(*x, key_mask=key_mask, causal=causal)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(x))
    assert all(p.grad.isfinite().all() for p in mechanism.parameters())


@every_direction_and_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs(name, causal, dtype):
    mechanism, full = problem(name, dtype=torch.float32, causal=causal)
    x = type(full)(*(t.to(dtype) for t in full)).require_grad()
    out = mechanism(*x, causal=causal)
    assert out.dtype == dtype
    expected = mechanism(*(t.detach().float() for t in x), causal=causal)
    assert relative_error(out, expected) < 1e-2
    out.float().square().sum().backward()
    assert all(g.dtype == dtype and g.isfinite().all() for g in gradients(x))


@pytest.mark.parametrize("name", KERNELS)
def test_autocast_computes_kernels_in_float32(name):
    mechanism, x = build(name, dtype=torch.float32), operands(dtype=torch.float32)
    expected, features = mechanism(*x), mechanism.features(x.q, "key")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mechanism(*x), expected)
        assert torch.equal(mechanism.features(x.q, "key"), features)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in KERNELS])
def test_autocast_of_the_others_is_near(name):
    mechanism, x = problem(name, dtype=torch.float32)
    expected = mechanism(*x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mechanism(*x)
    assert relative_error(out, expected) < 2e-2
    if name == "softmax":
        assert not torch.equal(out.float(), expected), "torch's own attention is cast"


@every_direction
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (2, 1)])
def test_small_sizes(name, causal, batch, length):
    mechanism, x = problem(name, causal=causal, batch=batch, queries=length)
    x.require_grad()
    out = mechanism(*x, causal=causal)
    assert out.shape == (batch, HEADS, length, VALUE_DIM)
    out.sum().backward()
    assert all(g.isfinite().all() for g in gradients(x))
    # A process whose share of a batch is empty still takes part in the exchange of gradients.
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mechanism.parameters())


@pytest.mark.parametrize("name", CROSS)
def test_no_keys_at_all(name):
    mechanism, x = build(name), operands(keys=0)
    key_mask = torch.ones(BATCH, 0, dtype=torch.bool)
    assert torch.equal(
        mechanism(*x, key_mask=key_mask), torch.zeros(BATCH, HEADS, QUERIES, VALUE_DIM, dtype=torch.float64)
    )


@every_direction
def test_strides_do_not_matter(name, causal):
    mechanism, x = problem(name, causal=causal)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in x]
    assert not strided[0].is_contiguous()
    x.require_grad()
    out, expected = mechanism(*strided, causal=causal), mechanism(*x, causal=causal)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(gradients(strided), gradients(x), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_every_parameter_learns(name, causal):
    mechanism, x = problem(name, causal=causal)
    mechanism(*x, causal=causal).square().sum().backward()
    # A bias in front of a batch norm is the one parameter without effect in training.
    silent = [n for n, p in mechanism.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-14]
    before_norm = [n for n in silent if n.startswith("kernel.spectrum.generator") and n.endswith(".bias")]
    assert silent == before_norm
    assert len(list(mechanism.parameters())) > 0


@pytest.mark.parametrize("name", LEARNED)
def test_frozen_kernel_stays_as_it_is(name):
    mechanism, x = build(name, frozen=True), operands().require_grad()
    mechanism(*x).sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in mechanism.parameters())
    assert x.q.grad is not None
