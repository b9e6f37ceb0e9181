"""Contracts on use: decoding, states, noise, refusals in words, compilation."""

import copy
import io
import pickle

import pytest
import torch

import klformer
from klformer.attention import AttentionSpec
from klformer.testing.problems import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KEYS,
    MAX_LEN,
    QUERIES,
    VALUE_DIM,
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
    DECODING,
    KERNELS,
    MECHANISMS,
    NAMES,
    VARIANTS,
    WITH_FREQUENCIES,
    WITH_NOISE,
    every_attention,
    every_direction,
)

#: Frequencies where something is compiled.
FEW = 8


@pytest.mark.parametrize("name", DECODING + VARIANTS)
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


@pytest.mark.parametrize("name", DECODING + VARIANTS)
def test_prepared_decoding_equals_the_causal_sequence(name):
    mechanism, x = build(name).eval(), operands(causal=True)
    expected = mechanism(*x, causal=True)
    state = mechanism.prepare_decoding(BATCH)
    state = mechanism.absorb(state, x.k[:, :, :3], x.v[:, :, :3])
    for t in range(3, QUERIES):
        out, state = mechanism.step(*(s[:, :, t : t + 1] for s in x), state)
        torch.testing.assert_close(out, expected[:, :, t : t + 1], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(mechanism.read(state, x.q[:, :, -1:]), out, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", DECODING)
def test_a_step_takes_one_token_of_its_own_batch(name):
    mechanism, x = build(name).eval(), operands(causal=True)
    with pytest.raises(ValueError, match=f"a step takes one token, got {QUERIES}"):
        mechanism.step(*x, mechanism.initial_state(BATCH))
    with pytest.raises(ValueError, match="the state is for 5 sequences, got a batch of 2"):
        mechanism.step(*(s[:, :, :1] for s in x), mechanism.initial_state(5))
    with pytest.raises(ValueError, match="the state is for 5 sequences, got a batch of 2"):
        mechanism.read(mechanism.initial_state(5), x.q)


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


@pytest.mark.parametrize("name", DECODING + VARIANTS)
def test_a_prompt_is_absorbed_at_once(name):
    mechanism, x = problem(name)
    key_mask = half_masked()
    state = mechanism.absorb(mechanism.initial_state(BATCH), x.k, x.v, key_mask=key_mask)
    expected = mechanism(*x, key_mask=key_mask)
    torch.testing.assert_close(mechanism.read(state, x.q), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", KERNELS + VARIANTS)
def test_states_of_two_parts_are_merged(name):
    mechanism, x = problem(name)
    key_mask, empty = half_masked(), mechanism.initial_state(BATCH)
    first, second = (
        mechanism.absorb(empty, x.k[:, :, part], x.v[:, :, part], key_mask=key_mask[:, part])
        for part in (slice(None, 5), slice(5, None))
    )
    merged = mechanism.read(mechanism.merge(first, second), x.q)
    torch.testing.assert_close(merged, mechanism(*x, key_mask=key_mask), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", DECODING)
def test_what_is_no_state_is_refused(name):
    mechanism, x = problem(name)
    for wrong in (None, x.k):
        with pytest.raises(TypeError, match="state must be of this attention's own"):
            mechanism.absorb(wrong, x.k, x.v)
        with pytest.raises(TypeError, match="state must be of this attention's own"):
            mechanism.read(wrong, x.q)


@pytest.mark.parametrize("name", KERNELS)
def test_a_state_does_not_grow(name):
    mechanism, x = problem(name)
    state = mechanism.initial_state(BATCH)
    sizes = [state.num_bytes]
    for _ in range(3):
        state = mechanism.absorb(state, x.k, x.v)
        sizes.append(state.num_bytes)
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
