"""Near and far: exact neighbours beside a kernel, against whole (L, L) matrices, however attention is called."""

import copy
import functools
import math

import pytest
import torch
from parts_support import on_ranks

import klformer
from klformer.attention import MultiheadAttention
from klformer.ops import near
from klformer.ops.near import Layout, merge_results, near_attention

NAMES = [
    name
    for name in klformer.attention_names()
    if "near_gain" in klformer.attention_options(name) and not name.endswith("-rks")
]
BATCH, HEADS, LENGTH, DIM, VALUES = 2, 3, 21, 4, 5


def build(name, window, **options):
    few = {"num_frequencies": 6} if "num_frequencies" in klformer.attention_options(name) else {}
    torch.manual_seed(0)
    sizes = {"num_heads": HEADS, "head_dim": DIM, "value_dim": VALUES}
    built = klformer.build_attention(name, **sizes, **few, window=window, near_gain=0.3, **options).double()
    return moved(built)


def moved(mechanism):
    """With parameters that are not as they started."""
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mechanism


def sequences(length=LENGTH):
    return [
        torch.randn(BATCH, HEADS, length, size, dtype=torch.float64, requires_grad=True) for size in (DIM, DIM, VALUES)
    ]


def kernel_matrix(mechanism, q, k):
    """kappa(q_i, k_j) with the envelopes of both, (B, H, L, S), of features and of nothing else."""
    if hasattr(mechanism, "query_map"):  # Hedgehog: features of queries are not divided by their sum here
        rows = torch.cat([mechanism.query_map, -mechanism.query_map], 1)
        return (q @ rows.mT).exp() @ mechanism.features(k, "key").mT
    kernel = mechanism.features(q, "query") @ mechanism.features(k, "key").mT
    weights = mechanism.query_log_weights(mechanism.present(), q)
    return kernel if weights is None else kernel * weights.exp().unsqueeze(-1)


def by_definition(mechanism, q, k, v, *, key_mask=None, key_bias=None, causal=False):
    places = torch.arange(q.shape[2])
    distance = places[:, None] - places
    beside = distance.abs() <= mechanism.window
    scores = q @ k.mT * mechanism.near_log_temperature.exp()[:, None, None] / DIM**0.5
    weights = kernel_matrix(mechanism, q, k) + beside * (scores + mechanism.near_log_gain[:, None, None]).exp()
    if key_bias is not None:
        weights = weights * key_bias.exp().unsqueeze(-2)
    if causal:
        weights = weights * (distance >= 0)
    if key_mask is not None:
        weights = weights * key_mask[:, None, None]
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.masked_fill(total == 0, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("window", [1, 7, 64])
def test_equals_the_definition_with_gradients(name, causal, window):
    mechanism, (q, k, v) = build(name, window), sequences()
    mask = torch.rand(BATCH, LENGTH) > 0.3
    mask[0, :9] = False  # padding at the beginning, and a query without any key where it is causal
    bias = torch.randn(BATCH, 1, LENGTH, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():  # what is not there may hold anything
        k.masked_fill_(~mask[:, None, :, None], 1e9)
    clean = k.detach().masked_fill(~mask[:, None, :, None], 0).requires_grad_()
    given = {"key_mask": mask, "key_bias": bias, "causal": causal}
    out, expected = mechanism(q, k, v, **given), by_definition(mechanism, q, clean, v, **given)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    d_out, shared = torch.randn_like(out), [q, v, bias, *mechanism.parameters()]
    got = torch.autograd.grad(out, [k, *shared], d_out, allow_unused=True)
    wanted = torch.autograd.grad(expected, [clean, *shared], d_out, allow_unused=True)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [1, 7, 64])
def test_steps_and_pieces_equal_the_causal_sequence(name, window):
    mechanism, (q, k, v) = build(name, window).eval(), sequences()
    with torch.no_grad():
        whole = mechanism(q, k, v, causal=True)
        for state in (mechanism.initial_state(BATCH), mechanism.prepare_decoding(BATCH)):
            sizes, steps = set(), []
            for token in zip(*(x.split(1, 2) for x in (q, k, v)), strict=True):
                out, state = mechanism.step(*token, state)
                steps.append(out)
                sizes.add(state.num_bytes)
            torch.testing.assert_close(torch.cat(steps, 2), whole, atol=1e-10, rtol=1e-10)
            assert len(sizes) == 1, "memory is constant"
        absorbed = mechanism.absorb(mechanism.initial_state(BATCH), k[:, :, :9], v[:, :, :9])
        last = mechanism.read(absorbed, q[:, :, 8:9])
        torch.testing.assert_close(last, whole[:, :, 8:9], atol=1e-10, rtol=1e-10)
    state, pieces = mechanism.initial_state(BATCH), []
    for here in (slice(0, 4), slice(4, 5), slice(5, LENGTH)):
        out, state = mechanism.extend(state, *(x[:, :, here] for x in (q, k, v)))
        pieces.append(out)
    found = torch.cat(pieces, 2)
    torch.testing.assert_close(found, whole, atol=1e-10, rtol=1e-10)
    inputs = [q, k, v, *mechanism.parameters()]
    gradients = [
        torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
        for out in (found, mechanism(q, k, v, causal=True))
    ]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("window", [1, 7, 64])
def test_decoding_in_place_goes_on_in_pieces(window):
    mechanism, (q, k, v) = build("gmm-prf", window).eval(), sequences()
    with torch.no_grad():
        whole, state = mechanism(q, k, v, causal=True), mechanism.prepare_decoding(BATCH)
        state = mechanism.absorb(state, k[:, :, :4], v[:, :, :4])
        places = [x.data_ptr() for x in state._held]
        for here in (slice(i, i + 1) for i in range(4, 11)):
            _, state = mechanism.step(*(x[:, :, here] for x in (q, k, v)), state)
        assert places == [x.data_ptr() for x in state._held]
        twin = copy.deepcopy(state)
        for here in (slice(11, 12), slice(12, LENGTH)):
            out, state = mechanism.extend(state, *(x[:, :, here] for x in (q, k, v)))
        torch.testing.assert_close(out, whole[:, :, 12:], atol=1e-10, rtol=1e-10)
        out, _ = mechanism.step(*(x[:, :, 11:12] for x in (q, k, v)), twin)
        torch.testing.assert_close(out, whole[:, :, 11:12], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["gmm-prf", "hedgehog"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("window", [2, 7])
def test_a_sequence_in_parts(name, causal, window):
    """Parts may be shorter than the window, or empty; neighbours of the others are fetched, and get gradients."""
    mechanism, (q, k, v) = build(name, window), sequences()
    mask = torch.rand(BATCH, LENGTH) > 0.3
    bias = torch.randn(BATCH, 1, LENGTH, dtype=torch.float64, requires_grad=True)
    cuts = [slice(0, 9), slice(9, 9), slice(9, 12), slice(12, LENGTH)]

    def work(parts):
        own, here = copy.copy(mechanism), cuts[parts.index]
        own.parts = parts
        weights = {"key_mask": mask[:, here], "key_bias": bias[:, :, here]}
        begun = own.begin(k[:, :, here], v[:, :, here], **weights, causal=causal)
        return own.finish(begun, q[:, :, here])

    found = torch.cat(on_ranks(len(cuts), work), 2)
    whole = mechanism(q, k, v, key_mask=mask, key_bias=bias, causal=causal)
    torch.testing.assert_close(found, whole, atol=1e-10, rtol=1e-10)
    inputs = [q, k, v, bias, *mechanism.parameters()]
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (found, whole)]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


def test_a_causal_encoder_streams_with_a_window():
    config = klformer.EncoderConfig(model_dim=8, num_layers=2, num_heads=2, attention="gmm-prf:window=3")
    encoder, x = klformer.TransformerEncoder(config, causal=True).eval(), torch.randn(2, 17, 8)
    streamed = torch.cat(list(encoder.encode_stream(x.split(4, 1))), 1)
    torch.testing.assert_close(streamed, encoder(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="sees neighbours on both sides"):
        list(klformer.TransformerEncoder(config).eval().encode_stream(x.split(4, 1)))


def test_near_parts_of_different_documents_do_not_mix():
    mechanism, (q, k, v) = build("gmm-prf", 3), sequences(12)
    documents = [slice(0, 7), slice(7, 11)]
    states = [mechanism.absorb(mechanism.initial_state(BATCH), k[:, :, d], v[:, :, d]) for d in documents]
    out = mechanism.extend(mechanism.merge(*states), *(x[:, :, 11:] for x in (q, k, v)))[0]
    torch.testing.assert_close(out, mechanism(q, k, v, causal=True)[:, :, 11:], atol=1e-10, rtol=1e-10)
    # The other way round, the token's neighbours are those of the first document.
    out = mechanism.extend(mechanism.merge(*reversed(states)), *(x[:, :, 11:] for x in (q, k, v)))[0]
    turned = [torch.cat([x[:, :, 7:11], x[:, :, :7], x[:, :, 11:]], 2) for x in (q, k, v)]
    torch.testing.assert_close(out, mechanism(*turned, causal=True)[:, :, 11:], atol=1e-10, rtol=1e-10)


def test_what_it_can_not_do_is_refused_in_words():
    with pytest.raises(
        ValueError, match=r"window must be 0 for feature_map 'rks', got 3: its estimates may be negative"
    ):
        klformer.build_attention("gmm-rks", num_heads=2, head_dim=4, window=3)
    with pytest.raises(ValueError, match="window must be at least 0, got -1"):
        klformer.build_attention("gmm-prf", num_heads=2, head_dim=4, window=-1)
    with pytest.raises(ValueError, match="near_gain must be finite"):
        klformer.build_attention("gmm-prf", num_heads=2, head_dim=4, window=1, near_gain=math.nan)
    mechanism, (q, k, v) = build("gmm-prf", 3), sequences()
    assert klformer.attention_capabilities("gmm-prf").cross
    assert not klformer.attention_capabilities("gmm-prf", window=3).cross
    with pytest.raises(ValueError, match="can't attend to another sequence"):
        mechanism(q[:, :, :4], k, v)
    layer = MultiheadAttention(model_dim=8, num_heads=2, attention="gmm-prf:window=3")
    with pytest.raises(ValueError, match="can't attend to another sequence"):
        layer(torch.randn(1, 5, 8), torch.randn(1, 5, 8))
    dropin = klformer.nn.MultiheadAttention(8, 2, batch_first=True, attention="gmm-prf:window=3")
    x = torch.randn(1, 5, 8)
    assert dropin(x, x, x, need_weights=False)[0].shape == x.shape
    with pytest.raises(ValueError, match="can't attend to another sequence: key must be query"):
        dropin(x, x.clone(), x, need_weights=False)
    state = mechanism.absorb(mechanism.initial_state(BATCH), k, v)
    with pytest.raises(ValueError, match="a state is read by the last token that it has absorbed, got 21 queries"):
        mechanism.read(state, q)
    with pytest.raises(ValueError, match="of an attention with another window"):
        mechanism.read(build("gmm-prf", 0).initial_state(BATCH), q)
    state = mechanism.initial_state(BATCH)
    klformer.resample(mechanism, torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="of another draw of its noise"):
        mechanism.absorb(state, k, v)


@pytest.mark.parametrize("name", ["gmm-prf", "atoms-prf", "linear-elu"])
@pytest.mark.parametrize("causal", [False, True])
def test_other_derivatives_and_compiled_programs(name, causal):
    mechanism, (q, k, v) = build(name, 2), [x.detach() for x in sequences()]
    attend, direction = functools.partial(mechanism, causal=causal), torch.randn_like(q)
    derivative = torch.func.jvp(lambda q: attend(q, k, v), (q,), (direction,))[1]
    ends = [attend(q + sign * 1e-6 * direction, k, v) for sign in (1, -1)]
    torch.testing.assert_close(derivative, (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-7)
    several = torch.func.vmap(lambda q: attend(q, k, v))(torch.stack([q, direction]))
    torch.testing.assert_close(several[1], attend(direction, k, v), atol=1e-10, rtol=1e-10)
    torch._dynamo.reset()
    compiled = torch.compile(mechanism, fullgraph=True, backend="aot_eager")
    leaf = q.clone().requires_grad_()
    out, expected = compiled(leaf, k, v, causal=causal), attend(leaf, k, v)
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=1e-9)
    got, wanted = (torch.autograd.grad(x.square().sum(), leaf)[0] for x in (out, expected))
    torch.testing.assert_close(got, wanted, atol=1e-8, rtol=1e-8)


def test_a_saved_attention_is_the_same():
    mechanism, other, x = build("gmm-prf", 3), build("gmm-prf", 3), sequences()
    with torch.no_grad():
        mechanism.near_log_gain.add_(torch.randn(HEADS))
    other.load_state_dict(mechanism.state_dict())
    assert torch.equal(other(*x), mechanism(*x))
    assert not any("near" in name for name in build("gmm-prf", 0).state_dict())


def dense(q, k, v, *, window, key_mask=None, key_bias=None, causal=False, before=0):
    distance = torch.arange(q.shape[2])[:, None] + before - torch.arange(k.shape[2])
    seen = (distance <= window) & (distance >= (0 if causal else -window))
    seen = seen if key_mask is None else seen & key_mask[:, None, None]
    scores = q @ k.mT if key_bias is None else q @ k.mT + key_bias.unsqueeze(-2)
    scores = scores.masked_fill(~seen, -math.inf)
    none = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)
    return weights @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("window", [0, 1, 7, 64])
@pytest.mark.parametrize("length", [0, 1, 5, 37, 130])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tile", [near.CPU_TILE_BYTES, 2048])
def test_near_attention_is_that_of_a_band(monkeypatch, window, length, before, causal, weighted, tile):
    monkeypatch.setattr(near, "CPU_TILE_BYTES", tile)
    generator = torch.Generator().manual_seed(length)
    sizes = ((length, 4), (length + before, 4), (length + before, 5))
    q, k, v = (torch.randn(2, 3, *s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes)
    given = {"window": window, "causal": causal, "before": before}
    leaves = [q, k, v]
    if weighted:
        given["key_mask"] = torch.rand(2, length + before, generator=generator) > 0.4
        given["key_bias"] = torch.randn(
            2, 1, length + before, generator=generator, dtype=torch.float64
        ).requires_grad_()
        leaves.append(given["key_bias"])
    (out, log_sum), (expected, logs) = near_attention(q, k, v, **given), dense(q, k, v, **given)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(log_sum, logs, atol=1e-10, rtol=1e-10)
    has_key, d_out, d_logs = logs > -math.inf, torch.randn_like(out), torch.randn_like(logs)
    got, wanted = (
        torch.autograd.grad((x * d_out).sum() + (y[has_key] * d_logs[has_key]).sum(), leaves)
        for x, y in ((out, log_sum), (expected, logs))
    )
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-10)


def test_near_attention_keeps_no_scores():
    def kept(window):
        sizes = []
        q, k, v = (torch.randn(1, 2, 2048, 8, requires_grad=True) for _ in range(3))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            near_attention(q, k, v, window=window)
        return sum(sizes)

    assert kept(64) == kept(1)
    assert Layout(64, 64, 0).block == 64


def test_second_derivatives_and_half_precision():
    q, k, v = (torch.randn(1, 1, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scale, far, log_sum = (
        torch.randn(*s, dtype=torch.float64).requires_grad_() for s in ((1,), (1, 1, 5, 3), (1, 1, 5))
    )

    def merged(q, k, v, scale, *far):
        return near_attention(q, k, v, window=1, scale=scale, far=far)

    assert torch.autograd.gradcheck(merged, (q, k, v, scale, far, log_sum))
    assert torch.autograd.gradgradcheck(merged, (q, k, v, scale, far, log_sum))
    halves = [torch.randn(1, 2, 50, 8).to(torch.bfloat16) for _ in range(3)]
    out, log_sum = near_attention(*halves, window=4)
    assert (out.dtype, log_sum.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), dense(*(x.float() for x in halves), window=4)[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("empty", [(), (0,), (1,), (0, 1)])
def test_results_over_disjoint_keys_merge(empty):
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (6, 9, 9))
    places = torch.arange(9)
    masks = [torch.zeros(1, 9, dtype=torch.bool) if i in empty else (places % 2 == i)[None] for i in range(2)]
    parts = [dense(q, k, v, window=9, key_mask=mask) for mask in masks]
    out, log_sum = merge_results(*parts)
    expected, logs = dense(q, k, v, window=9, key_mask=masks[0] | masks[1])
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(log_sum, logs, atol=1e-12, rtol=1e-12)
    gradients = [torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (out, expected)]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


def test_a_large_weight_of_keys_has_gradients():
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    results = [near_attention(q, k, v, window=2, key_bias=bias)[0] for bias in (None, torch.full((1, 1, 5), 100.0))]
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in results]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_in_half_precision(dtype):
    attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8, window=4, near_gain=0.0).eval()
    q, k, v = (torch.randn(1, 2, 9, 8).to(dtype) for _ in range(3))
    with torch.no_grad():
        whole, state, steps = attention(q, k, v, causal=True), attention.prepare_decoding(1), []
        for token in zip(*(x.split(1, 2) for x in (q, k, v)), strict=True):
            out, state = attention.step(*token, state)
            steps.append(out)
    found = torch.cat(steps, 2)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), whole.float(), atol=2e-2, rtol=2e-2)


def test_a_state_without_tokens_merges_to_the_other():
    mechanism, (q, k, v) = build("gmm-prf", 4), sequences()
    state = mechanism.absorb(mechanism.initial_state(BATCH), k, v)
    expected = mechanism.read(state, q[:, :, -1:])
    for pair in ((state, mechanism.initial_state(BATCH)), (mechanism.initial_state(BATCH), state)):
        torch.testing.assert_close(mechanism.read(mechanism.merge(*pair), q[:, :, -1:]), expected)


def test_copies_of_an_attention_read_its_states():
    mechanism, (q, k, v) = build("gmm-prf", 0), sequences()
    state = mechanism.kernel_state(k, v)
    assert torch.equal(copy.deepcopy(mechanism).read(state, q), mechanism.read(state, q))


@pytest.mark.parametrize("causal", [False, True])
def test_an_exported_layer_takes_any_length(causal):
    layer = MultiheadAttention(model_dim=16, num_heads=2, attention="gmm-prf:window=4", causal=causal).eval()
    length = torch.export.Dim("length", min=1)
    program = torch.export.export(layer, (torch.randn(2, 9, 16),), dynamic_shapes={"x": {1: length}})
    for tokens in (1, 7, 300):
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-5)
