"""What every attention must do, by name: a new one is tested by being registered."""

import copy
import io
import pickle

import pytest
import torch
from oracles import by_definition
from support import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KEYS,
    MAX_LEN,
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

import klformer
from klformer.attention import AttentionSpec
from klformer.attention.kernelized import KernelizedAttention
from klformer.kernels import SPECTRA, exact

NAMES = klformer.attention_names()
MECHANISMS = {name: build(name) for name in NAMES}
KERNELS = [name for name, mechanism in MECHANISMS.items() if isinstance(mechanism, KernelizedAttention)]
CROSS = [name for name, mechanism in MECHANISMS.items() if mechanism.supports_cross]
CAUSAL = [name for name, mechanism in MECHANISMS.items() if mechanism.supports_causal]
DECODING = [name for name, mechanism in MECHANISMS.items() if mechanism.supports_decoding]
LEARNED = [f"{spectrum}-{fmap}" for fmap in ("rks", "prf") for spectrum in SPECTRA]
WITH_FREQUENCIES = [name for name in KERNELS if name != "linear-elu"]
WITH_NOISE = [*WITH_FREQUENCIES, "reformer"]

every_attention = pytest.mark.parametrize("name", NAMES)
#: Every attention as it can be used: not all have a causal form.
every_direction = pytest.mark.parametrize(
    ("name", "causal"),
    [(name, False) for name in NAMES] + [(name, True) for name in CAUSAL],
    ids=NAMES + [f"{name}-causal" for name in CAUSAL],
)


def gradients(x):
    """Of the operands; what a mechanism does not use has gradient 0."""
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in x]


def test_names_of_the_paper():
    learned = {"gmm-rks", "fastfood-rks", "generative-rks", "gmm-prf", "fastfood-prf", "generative-prf"}
    fixed = {"rbf-rks", "performer", "linear-elu", "softmax"}
    others = {"synthesizer", "sinkhorn", "sparse", "reformer", "local", "longformer", "linformer", "bigbird"}
    assert set(NAMES) == learned | fixed | others


@every_direction
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_equals_its_definition(name, causal, masked):
    mechanism, x = problem(name, causal=causal)
    key_mask = half_masked(keys=x.k.shape[2]) if masked else None
    expected = by_definition(mechanism, *x, key_mask=key_mask, causal=causal)
    actual = mechanism(*x, key_mask=key_mask, causal=causal)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


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


@every_direction
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


@pytest.mark.parametrize("name", DECODING)
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


@pytest.mark.parametrize("name", DECODING)
def test_a_step_takes_one_token_of_its_own_batch(name):
    mechanism, x = build(name).eval(), operands(causal=True)
    with pytest.raises(ValueError, match=f"a step takes one token, got {QUERIES}"):
        mechanism.step(*x, mechanism.initial_state(BATCH))
    if name in KERNELS:
        with pytest.raises(ValueError, match="the state is for 5 sequences, got a batch of 2"):
            mechanism.step(*(s[:, :, :1] for s in x), mechanism.initial_state(5))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("module", "tokens"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_steps_take_the_precisions_that_forward_takes(name, module, tokens):
    mechanism, x = build(name, dtype=module).eval(), operands(dtype=tokens, causal=True)
    expected = mechanism(*x, causal=True)
    out, _ = mechanism.step(*(s[:, :, :1] for s in x), mechanism.initial_state(BATCH))
    assert out.dtype == expected.dtype == tokens
    assert relative_error(out, expected[:, :, :1]) < 1e-5
    assert mechanism.features(x.q, "query").dtype == tokens


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DECODING])
def test_decoding_that_is_not_possible_is_refused(name):
    mechanism = MECHANISMS[name]
    with pytest.raises(ValueError, match=f"{type(mechanism).__name__} can't decode step by step"):
        mechanism.initial_state(BATCH)


@pytest.mark.parametrize("name", DECODING)
def test_a_prompt_is_absorbed_at_once(name):
    mechanism, x = problem(name)
    key_mask = half_masked()
    state = mechanism.absorb(mechanism.initial_state(BATCH), x.k, x.v, key_mask=key_mask)
    expected = mechanism(*x, key_mask=key_mask)
    torch.testing.assert_close(mechanism.read(state, x.q), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", KERNELS)
def test_a_state_does_not_grow(name):
    mechanism, x = problem(name)
    state = mechanism.initial_state(BATCH)
    sizes = [sum(t.numel() for t in vars(state).values())]
    for _ in range(3):
        state = mechanism.absorb(state, x.k, x.v)
        sizes.append(sum(t.numel() for t in vars(state).values()))
    assert len(set(sizes)) == 1


@every_attention
def test_state_dict_reproduces_bit_for_bit(name):
    (original, x), other = problem(name), build(name)
    buffer = io.BytesIO()
    torch.save(original.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(*x), original(*x))


@every_attention
def test_copies_and_pickles(name):
    mechanism, x = problem(name)
    expected = mechanism(*x)
    assert torch.equal(copy.deepcopy(mechanism)(*x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(mechanism))(*x), expected)


@pytest.mark.parametrize("name", WITH_NOISE)
def test_resampling_touches_buffers_only(name):
    mechanism, x = problem(name)
    before, out = [p.clone() for p in mechanism.parameters()], mechanism(*x)
    klformer.resample(mechanism, torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(before, mechanism.parameters(), strict=True))
    first = mechanism(*x)
    assert not torch.allclose(first, out)
    klformer.resample(mechanism, torch.Generator().manual_seed(1))
    assert torch.equal(mechanism(*x), first), "equal generators must give equal noise"


@every_attention
def test_forward_draws_no_noise(name):
    mechanism, x = problem(name)
    state = torch.get_rng_state()
    first = mechanism(*x)
    assert torch.equal(first, mechanism(*x))
    assert torch.equal(torch.get_rng_state(), state)


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


@every_attention
def test_forward_leaves_no_trace(name):
    """Training, decoding and looking at features change no buffer: only `resample` does."""
    mechanism = MECHANISMS[name]
    causal = mechanism.supports_causal
    x = operands(causal=True)
    before = {key: tensor.clone() for key, tensor in mechanism.state_dict().items()}
    mechanism(*x, causal=causal)
    if mechanism.supports_decoding:
        mechanism.step(*(s[:, :, :1] for s in x), mechanism.initial_state(BATCH))
    if name in KERNELS:
        mechanism.features(x.q, "query")
    after = mechanism.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert torch.equal(mechanism.eval()(*x, causal=causal), mechanism.train()(*x, causal=causal))


@every_direction
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


#: Rows of linformer and sorted blocks of sinkhorn are no averages; elu(x) + 1 is 0 far below 0.
AVERAGES = [name for name in NAMES if name not in ("linformer", "sinkhorn", "linear-elu")]


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("std", [1.0, 100.0, 1e4])
def test_weights_sum_to_one_among_equal_keys(name, causal, std):
    """One token many times: whatever the scores are, they tie, and values of 1 average to 1."""
    mechanism, x = problem(name, dtype=torch.float32, causal=causal, queries=64, std=std)
    x.q, x.k = x.q[:, :, :1].expand_as(x.q), x.k[:, :, :1].expand_as(x.k)
    out = mechanism(x.q, x.k, torch.ones_like(x.v), causal=causal)
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-3, rtol=0)


@every_direction
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
    mechanism, x = problem(name)
    num_keys = x.k.shape[2]
    with pytest.raises(ValueError, match="key_mask must be a bool tensor of shape"):
        mechanism(*x, key_mask=torch.ones(BATCH, num_keys))
    with pytest.raises(ValueError, match="key_mask must be a bool tensor of shape"):
        mechanism(*x, key_mask=torch.ones(BATCH, num_keys + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"longer than max_len={MAX_LEN}"):
        mechanism(*problem(name, queries=MAX_LEN + 1)[1])


@every_attention
def test_what_is_not_possible_is_refused(name):
    mechanism = MECHANISMS[name]
    with pytest.raises(ValueError, match="causal needs as many queries" if name in CAUSAL else "has no causal form"):
        mechanism(*operands(), causal=True)
    if name not in CROSS:
        with pytest.raises(ValueError, match=f"can't attend to another sequence: {QUERIES} queries, {KEYS} keys"):
            mechanism(*operands())
    if mechanism.needs_max_len:
        with pytest.raises(ValueError, match="needs max_len"):
            klformer.build_attention(name, num_heads=2, head_dim=4)


def test_unknown_names_and_options():
    sizes = {"num_heads": 2, "head_dim": 4}
    with pytest.raises(ValueError, match="unknown attention 'gmm-rsk'; did you mean 'gmm-rks'"):
        klformer.build_attention("gmm-rsk", **sizes)
    with pytest.raises(TypeError, match="no option 'num_frequency'; did you mean 'num_frequencies'"):
        klformer.build_attention("gmm-rks", **sizes, num_frequency=8)
    with pytest.raises(TypeError, match="softmax has no option 'smoothing'"):
        klformer.build_attention("softmax", **sizes, smoothing=1.0)
    for option, value, error, message in [
        ("smoothing", -1.0, ValueError, "smoothing must be finite and at least 0, got -1.0"),
        ("smoothing", float("nan"), ValueError, "smoothing must be finite"),
        ("smoothing", "1", TypeError, "smoothing must be a number, got '1'"),
        ("tied", "no", TypeError, "tied must be True or False, got 'no'"),
        ("frozen", "false", TypeError, "frozen must be True or False"),
    ]:
        with pytest.raises(error, match=message):
            klformer.build_attention("gmm-rks", **sizes, **{option: value})
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        klformer.build_attention("softmax", num_heads=0, head_dim=4)
    with pytest.raises(TypeError, match="head_dim must be an int"):
        klformer.build_attention("softmax", num_heads=2, head_dim=4.0)
    with pytest.raises(ValueError, match="has no explicit features"):
        klformer.build_attention("softmax", **sizes).features(torch.zeros(1, 2, 3, 4), "query")


def test_kernels_have_the_scale_and_the_coefficients_that_they_should():
    """Against closed forms that share nothing with the code: scaling by D^(-1/4), smoothing, norm coefficients."""
    x = operands(std=0.5)
    scaled = [t * HEAD_DIM**-0.25 for t in (x.q, x.k)]
    many, draws = {"num_heads": HEADS, "head_dim": HEAD_DIM, "num_frequencies": 2_000}, 20
    generator = torch.Generator().manual_seed(5)
    for name, options, expected in [
        ("rbf-rks", {"smoothing": 0.0}, exact.gaussian_kernel(*scaled)),
        ("rbf-rks", {}, exact.gaussian_kernel(*scaled) + 1),
        ("rbf-rks", {"smoothing": 0.25, "lengthscale": 2.0}, exact.gaussian_kernel(*scaled, lengthscale=2.0) + 0.25),
        ("performer", {}, exact.softmax_kernel(*scaled)),
        ("performer", {"norm_coefficient": 1.0}, exact.gaussian_kernel(*scaled)),
        ("fastfood-prf", {"lengthscale": 1.0, "learn": "none"}, exact.gaussian_kernel(*scaled)),
    ]:
        mechanism = klformer.build_attention(name, **many, **options).double()
        estimates = []
        with torch.no_grad():
            for _ in range(draws):
                klformer.resample(mechanism, generator)
                estimates.append(mechanism.kernel.estimate(x.q, x.k))
        stacked = torch.stack(estimates)
        standard_error = stacked.std(0).norm() / draws**0.5
        assert (stacked.mean(0) - expected).norm() < 4 * standard_error, (name, options)
        # The test must be able to fail: a wrong scale or coefficient is off by far more.
        assert standard_error < 0.02 * expected.norm(), (name, options)


def test_performer_is_softmax_attention_with_many_features():
    x = operands(std=0.5)
    softmax, performer = build("softmax"), build("performer", num_frequencies=100_000)
    assert relative_error(performer(*x), softmax(*x)) < 0.01


def test_features_want_the_right_shape_and_role():
    mechanism = build("gmm-rks")
    with pytest.raises(ValueError, match="role must be one of 'query', 'key', got 'kye'"):
        mechanism.features(operands().q, role="kye")
    with pytest.raises(ValueError, match="x must have shape"):
        mechanism.features(operands(heads=1).q, "query")


@every_direction
def test_compiles_whole(name, causal):
    torch._dynamo.reset()
    layer = klformer.MultiheadAttention(
        model_dim=15,
        num_heads=HEADS,
        attention=AttentionSpec(
            name=name, options={"num_frequencies": FEW} if name in WITH_FREQUENCIES else small_options(name)
        ),
        causal=causal,
        max_len=QUERIES,
    )
    x, key_mask = torch.randn(BATCH, QUERIES, 15), half_masked(keys=QUERIES)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer(x, key_mask=key_mask)
    expected.square().sum().backward()
    expected_gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    actual = compiled(x, key_mask=key_mask)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    actual.square().sum().backward()
    for gradient, p in zip(expected_gradients, layer.parameters(), strict=True):
        torch.testing.assert_close(p.grad, gradient, atol=1e-4, rtol=1e-4)


FEW = 8
