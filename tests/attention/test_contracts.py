"""What every attention must do, by name: a new one is tested by being registered."""

import copy
import io
import pickle

import pytest
import torch
from support import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KEYS,
    QUERIES,
    VALUE_DIM,
    build,
    half_masked,
    operands,
    quadratic,
    relative_error,
)

import klformer
from klformer.attention.kernelized import KernelizedAttention
from klformer.kernels import SPECTRA

NAMES = klformer.attention_names()
KERNELS = [name for name in NAMES if name != "softmax"]
LEARNED = [f"{spectrum}-{fmap}" for fmap in ("rks", "prf") for spectrum in SPECTRA]
WITH_NOISE = [name for name in KERNELS if name != "linear-elu"]

every_attention = pytest.mark.parametrize("name", NAMES)
both_directions = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def test_names_of_the_paper():
    papers = {"gmm-rks", "fastfood-rks", "generative-rks", "gmm-prf", "fastfood-prf", "generative-prf"}
    assert papers | {"rbf-rks", "performer", "linear-elu", "softmax"} <= set(NAMES)


@every_attention
@both_directions
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_equals_its_definition(name, causal, masked):
    mechanism, x = build(name), operands(causal=causal)
    key_mask = half_masked(keys=x.k.shape[2]) if masked else None
    expected = quadratic(mechanism, x, key_mask=key_mask, causal=causal)
    actual = mechanism(*x, key_mask=key_mask, causal=causal)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@every_attention
@both_directions
def test_float32_is_near_float64(name, causal):
    mechanism, x = build(name), operands(causal=causal, queries=211, keys=307)
    expected = mechanism(*x, causal=causal)
    actual = mechanism.float()(*(t.float() for t in x), causal=causal)
    assert relative_error(actual, expected) < 1e-5


@every_attention
@both_directions
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_gradients(name, causal, masked):
    mechanism = build(name, **({"num_frequencies": 6} if name in WITH_NOISE else {}))
    x = operands(causal=causal, batch=2, queries=5, keys=4).require_grad()
    key_mask = half_masked(keys=x.k.shape[2]) if masked else None
    parameters = tuple(mechanism.parameters())

    def attend(*inputs):
        return mechanism(*inputs[:3], key_mask=key_mask, causal=causal)

    # The parameters are perturbed in place by gradcheck, so that it is enough to name them.
    assert torch.autograd.gradcheck(attend, (*x, *parameters), atol=1e-6)


@every_attention
@both_directions
@pytest.mark.parametrize("poison", [1e9, float("inf"), float("nan")])
def test_padding_cannot_leak(name, causal, poison):
    mechanism, x = build(name, dtype=torch.float32), operands(dtype=torch.float32, causal=causal)
    key_mask = half_masked(keys=x.k.shape[2])
    clean = mechanism(*x, key_mask=key_mask, causal=causal)
    padding = ~key_mask[:, None, :, None]
    x.k, x.v = x.k.masked_fill(padding, poison), x.v.masked_fill(padding, poison)
    x.require_grad()
    poisoned = mechanism(*x, key_mask=key_mask, causal=causal)
    assert torch.equal(clean, poisoned)
    poisoned.sum().backward()
    for gradient in (x.k.grad, x.v.grad):
        assert torch.equal(
            gradient[padding.expand_as(gradient)], torch.zeros_like(gradient[padding.expand_as(gradient)])
        )
    assert all(g.isfinite().all() for g in (x.q.grad, x.k.grad, x.v.grad))


@every_attention
@both_directions
def test_nothing_to_attend_to_gives_zero(name, causal):
    mechanism, x = build(name, dtype=torch.float32), operands(dtype=torch.float32, causal=causal).require_grad()
    key_mask = half_masked(keys=x.k.shape[2])
    key_mask[1] = False
    out = mechanism(*x, key_mask=key_mask, causal=causal)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    out.square().sum().backward()
    gradients = [t.grad for t in x] + [p.grad for p in mechanism.parameters()]
    assert all(g.isfinite().all() for g in gradients)
    assert all(torch.equal(t.grad[1], torch.zeros_like(t.grad[1])) for t in x)


@every_attention
@both_directions
def test_batch_entries_are_independent(name, causal):
    mechanism, x = build(name, dtype=torch.float32), operands(dtype=torch.float32, causal=causal).require_grad()
    out = mechanism(*x, causal=causal)
    out[0].sum().backward()
    assert all(torch.equal(t.grad[1], torch.zeros_like(t.grad[1])) for t in x)
    alone = mechanism(*(t[:1] for t in x), causal=causal)
    torch.testing.assert_close(alone, out[:1], atol=1e-5, rtol=1e-5)


@every_attention
def test_no_look_ahead(name):
    mechanism, x = build(name, dtype=torch.float32), operands(dtype=torch.float32, causal=True).require_grad()
    position = 4
    out = mechanism(*x, causal=True)
    out[:, :, position].sum().backward()
    for t in (x.k, x.v):
        assert torch.equal(t.grad[:, :, position + 1 :], torch.zeros_like(t.grad[:, :, position + 1 :]))
    with torch.no_grad():
        for t in x:
            t[:, :, position + 1 :] = 1e9
        poisoned = mechanism(*x, causal=True)
    torch.testing.assert_close(poisoned[:, :, : position + 1], out[:, :, : position + 1], atol=1e-5, rtol=1e-5)


@every_attention
def test_steps_equal_the_causal_sequence(name):
    mechanism, x = build(name).eval(), operands(causal=True)
    expected = mechanism(*x, causal=True)
    state = mechanism.initial_state(BATCH)
    for t in range(QUERIES):
        before = state
        out, state = mechanism.step(*(s[:, :, t : t + 1] for s in x), state)
        torch.testing.assert_close(out, expected[:, :, t : t + 1], atol=1e-10, rtol=1e-10)
    again, _ = mechanism.step(*(s[:, :, -1:] for s in x), before)
    assert torch.equal(again, out), "a state must not be changed by a step"


@every_attention
def test_a_prompt_is_absorbed_at_once(name):
    mechanism, x = build(name).eval(), operands()
    key_mask = half_masked()
    state = mechanism.absorb(mechanism.initial_state(BATCH), x.k, x.v, key_mask=key_mask)
    expected = mechanism(*x, key_mask=key_mask)
    torch.testing.assert_close(mechanism.read(state, x.q), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", KERNELS)
def test_a_state_does_not_grow(name):
    mechanism, x = build(name).eval(), operands()
    state = mechanism.initial_state(BATCH)
    sizes = [sum(t.numel() for t in vars(state).values())]
    for _ in range(3):
        state = mechanism.absorb(state, x.k, x.v)
        sizes.append(sum(t.numel() for t in vars(state).values()))
    assert len(set(sizes)) == 1


@every_attention
def test_state_dict_reproduces_bit_for_bit(name):
    original, other, x = build(name).eval(), build(name).eval(), operands()
    buffer = io.BytesIO()
    torch.save(original.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(*x), original(*x))


@every_attention
def test_copies_and_pickles(name):
    mechanism, x = build(name).eval(), operands()
    expected = mechanism(*x)
    assert torch.equal(copy.deepcopy(mechanism)(*x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(mechanism))(*x), expected)


@pytest.mark.parametrize("name", WITH_NOISE)
def test_resampling_touches_buffers_only(name):
    mechanism, x = build(name).eval(), operands()
    before, out = [p.clone() for p in mechanism.parameters()], mechanism(*x)
    klformer.resample(mechanism, torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(before, mechanism.parameters(), strict=True))
    first = mechanism(*x)
    assert not torch.allclose(first, out)
    klformer.resample(mechanism, torch.Generator().manual_seed(1))
    assert torch.equal(mechanism(*x), first), "equal generators must give equal noise"


@every_attention
def test_forward_draws_no_noise(name):
    mechanism, x = build(name), operands()
    state = torch.get_rng_state()
    first = mechanism(*x)
    assert torch.equal(first, mechanism(*x))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", LEARNED)
@both_directions
def test_every_parameter_learns(name, causal):
    mechanism, x = build(name), operands(causal=causal)
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


@every_attention
@both_directions
@pytest.mark.parametrize("std", [0.0, 1e-3, 32.0, 1e4])
def test_extreme_inputs_stay_finite(name, causal, std):
    mechanism = build(name, dtype=torch.float32)
    x = operands(dtype=torch.float32, causal=causal, queries=67, std=std).require_grad()
    out = mechanism(*x, causal=causal)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(t.grad.isfinite().all() for t in x)


@every_attention
@both_directions
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs(name, causal, dtype):
    mechanism = build(name, dtype=torch.float32)
    full = operands(dtype=torch.float32, causal=causal)
    x = type(full)(*(t.to(dtype) for t in full)).require_grad()
    out = mechanism(*x, causal=causal)
    assert out.dtype == dtype
    expected = mechanism(*(t.detach().float() for t in x), causal=causal)
    assert relative_error(out, expected) < 1e-2
    out.float().square().sum().backward()
    assert all(t.grad.dtype == dtype and t.grad.isfinite().all() for t in x)


@every_attention
def test_autocast_computes_features_in_float32(name):
    mechanism, x = build(name, dtype=torch.float32), operands(dtype=torch.float32)
    expected = mechanism(*x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mechanism(*x)
    assert relative_error(out, expected) < (1e-6 if name in ("linear-elu", "rbf-rks", "performer") else 2e-2)


@every_attention
@both_directions
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (2, 1)])
def test_small_sizes(name, causal, batch, length):
    mechanism = build(name)
    x = operands(causal=causal, batch=batch, queries=length).require_grad()
    out = mechanism(*x, causal=causal)
    assert out.shape == (batch, HEADS, length, VALUE_DIM)
    out.sum().backward()
    assert all(t.grad.shape == t.shape for t in x)


@every_attention
def test_no_keys_at_all(name):
    mechanism, x = build(name), operands(keys=0)
    key_mask = torch.ones(BATCH, 0, dtype=torch.bool)
    assert torch.equal(
        mechanism(*x, key_mask=key_mask), torch.zeros(BATCH, HEADS, QUERIES, VALUE_DIM, dtype=torch.float64)
    )


@every_attention
@both_directions
def test_strides_do_not_matter(name, causal):
    mechanism, x = build(name), operands(causal=causal)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in x]
    assert not strided[0].is_contiguous()
    x.require_grad()
    out, expected = mechanism(*strided, causal=causal), mechanism(*x, causal=causal)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(strided, x, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=1e-12)


@every_attention
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (BATCH, HEADS + 1, QUERIES, HEAD_DIM)}, "q must have shape"),
        ({"k": (BATCH, HEADS, KEYS, HEAD_DIM + 1)}, "k must have shape"),
        ({"v": (BATCH, HEADS, KEYS + 1, VALUE_DIM)}, "same length"),
        ({"k": (BATCH + 1, HEADS, KEYS, HEAD_DIM)}, "same batch size"),
    ],
)
def test_wrong_shapes_are_named(name, change, message):
    shapes = {
        "q": (BATCH, HEADS, QUERIES, HEAD_DIM),
        "k": (BATCH, HEADS, KEYS, HEAD_DIM),
        "v": (BATCH, HEADS, KEYS, VALUE_DIM),
    } | change
    with pytest.raises(ValueError, match=message):
        build(name)(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes.values()))


@every_attention
def test_wrong_masks_are_named(name):
    mechanism, x = build(name), operands()
    with pytest.raises(ValueError, match="key_mask must be a bool tensor of shape"):
        mechanism(*x, key_mask=torch.ones(BATCH, KEYS))
    with pytest.raises(ValueError, match="key_mask must be a bool tensor of shape"):
        mechanism(*x, key_mask=torch.ones(BATCH, QUERIES, dtype=torch.bool))
    with pytest.raises(ValueError, match="causal needs as many queries as keys"):
        mechanism(*x, causal=True)
    with pytest.raises(ValueError, match="longer than max_len=512"):
        mechanism(*operands(queries=513))


def test_unknown_names_and_options():
    sizes = {"num_heads": 2, "head_dim": 4}
    with pytest.raises(ValueError, match="unknown attention 'gmm-rsk'; did you mean 'gmm-rks'"):
        klformer.build_attention("gmm-rsk", **sizes)
    with pytest.raises(TypeError, match="no option 'num_frequency'; did you mean 'num_frequencies'"):
        klformer.build_attention("gmm-rks", **sizes, num_frequency=8)
    with pytest.raises(TypeError, match="softmax has no option 'smoothing'"):
        klformer.build_attention("softmax", **sizes, smoothing=1.0)
    with pytest.raises(ValueError, match="smoothing must be at least 0"):
        klformer.build_attention("gmm-rks", **sizes, smoothing=-1.0)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        klformer.build_attention("softmax", num_heads=0, head_dim=4)
    with pytest.raises(TypeError, match="head_dim must be an int"):
        klformer.build_attention("softmax", num_heads=2, head_dim=4.0)
    with pytest.raises(ValueError, match="has no explicit features"):
        klformer.build_attention("softmax", **sizes).features(torch.zeros(1, 2, 3, 4))


@pytest.mark.parametrize("name", KERNELS)
def test_features_are_the_kernel_with_smoothing(name):
    mechanism, x = build(name), operands()
    assert isinstance(mechanism, KernelizedAttention)
    same = (mechanism.features(x.q) ** 2).sum(-1)
    if name.endswith("rks"):
        torch.testing.assert_close(same, torch.full_like(same, 2.0), msg="kappa(x, x) + smoothing must be 1 + 1")


@every_attention
@both_directions
def test_compiles_whole(name, causal):
    torch._dynamo.reset()
    layer = klformer.MultiheadAttention(
        model_dim=15,
        num_heads=HEADS,
        attention=name,
        causal=causal,
        options={"num_frequencies": FEW} if name in WITH_NOISE else None,
    )
    x, key_mask = torch.randn(BATCH, QUERIES, 15), half_masked(keys=QUERIES)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer(x, key_mask=key_mask)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    actual = compiled(x, key_mask=key_mask)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    actual.square().sum().backward()
    for gradient, p in zip(gradients, layer.parameters(), strict=True):
        torch.testing.assert_close(p.grad, gradient, atol=1e-4, rtol=1e-4)


FEW = 8
