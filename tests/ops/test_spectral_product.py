"""The product against its quadratic definition: backends, chunks, maps, weights, precision, memory of what it keeps."""

import functools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import relative_error

import klformer
from klformer.ops import spectral_product as op
from klformer.ops.envelopes import simplex_envelope
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS, Call, KernelState, spectral_product
from klformer.ops.spectral_product.chunked import ChunkedBackend
from klformer.ops.spectral_product.decoding import DecodingState
from klformer.ops.spectral_product.operands import SpectralKernel

BATCH, HEADS, LENGTH, KEYS, DIM, VALUES, FREQUENCIES = 2, 3, 37, 29, 5, 7, 11
#: The chunked backend at awkward chunks.
CHUNKED = {f"chunked-{chunk}": chunk for chunk in (1, 7, LENGTH)}
for _name, _chunk in CHUNKED.items():
    op.register_backend(_name, ChunkedBackend(chunk=_chunk))
#: Every backend but the definition, for CPUs; each must give what that gives.
FAST = [name for name in BACKENDS if name not in ("reference", "flash", "triton")]


def skip_unless_served(backend, feature_map, causal):
    if backend.startswith("flash") and (feature_map != "prf" or causal):
        pytest.skip("flash is for bidirectional products of exponential maps")


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def problem(feature_map, *, paired=False, length=LENGTH, keys=KEYS, shared=False, weighted=False, smoothing=None):
    """Operands by name; with `weighted` keys and frequencies have log-weights."""
    heads = 1 if shared else HEADS
    needs = FEATURE_MAPS[feature_map].needs_frequencies
    operands = {
        "q": normal(BATCH, HEADS, length, DIM),
        "k": normal(BATCH, HEADS, keys, DIM),
        "v": normal(BATCH, HEADS, keys, VALUES),
        "omega": normal(heads, FREQUENCIES, DIM) if needs else None,
        "pair_offset": normal(heads, DIM) if paired else None,
        "key_bias": normal(1 if shared else BATCH, heads, keys) if weighted else None,
        "frequency_bias": normal(heads, FREQUENCIES) if weighted and needs else None,
    }
    if smoothing is not None:
        operands["smoothing"] = torch.full((heads,), smoothing, dtype=torch.float64, requires_grad=True)
    return operands


def tensors(operands):
    return [t for t in operands.values() if isinstance(t, torch.Tensor) and t.requires_grad]


def kernel_of(feature_map, operands, **envelope):
    names = ("omega", "pair_offset", "frequency_bias", "smoothing")
    return SpectralKernel(FEATURE_MAPS[feature_map], **{n: operands.get(n) for n in names}, **envelope)


def check_against_the_definition(
    operands, feature_map, *, backend, causal=False, key_mask="random", norm_coefficient=0.0, simplex=False
):
    """Results, log-sums and gradients are those of the reference; one sequence of the batch has no key at all."""
    if isinstance(key_mask, str):
        key_mask = torch.rand(BATCH, 1, operands["k"].shape[2]) > 0.3
        key_mask[1] = False
    kernel = kernel_of(feature_map, operands, simplex=simplex, norm_coefficient=norm_coefficient)
    qkv = [operands[name] for name in ("q", "k", "v")]
    given = {"key_mask": key_mask, "key_bias": operands["key_bias"], "causal": causal}
    found = {name: op.attend(kernel, *qkv, **given, backend=name) for name in ("reference", backend)}
    (expected, logs), (actual, actual_logs) = found.values()
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(actual_logs, logs, atol=1e-10, rtol=1e-10)
    inputs, d_out, d_logs = tensors(operands), torch.randn_like(expected), torch.randn_like(logs)
    has_key = logs > -math.inf
    wanted, got = (
        torch.autograd.grad((out * d_out).sum() + (log_sum[has_key] * d_logs[has_key]).sum(), inputs)
        for out, log_sum in found.values()
    )
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-10)
    return actual


KINDS = [
    # So little smoothing that many means of eleven cosines are below half of it.
    pytest.param("rks", {"smoothing": 0.05}, id="rks"),
    pytest.param("rks", {"smoothing": 0.05, "paired": True}, id="rks-paired"),
    pytest.param("prf", {}, id="prf"),
    pytest.param("elu", {}, id="elu"),
]


@pytest.mark.parametrize(("feature_map", "options"), KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("shared", [False, True], ids=["per-head", "shared"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("backend", FAST)
def test_equals_the_definition_with_gradients(feature_map, options, causal, shared, weighted, backend):
    skip_unless_served(backend, feature_map, causal)
    operands = problem(feature_map, keys=LENGTH if causal else KEYS, shared=shared, weighted=weighted, **options)
    check_against_the_definition(operands, feature_map, backend=backend, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("backend", FAST)
def test_the_envelope_of_norms_is_a_weight_of_the_keys(causal, weighted, backend):
    """As a number it is what the same weights written out are, also where keys that are not there hold no numbers."""
    skip_unless_served(backend, "prf", causal)
    operands = problem("prf", keys=LENGTH if causal else KEYS, weighted=weighted)
    key_mask = torch.rand(BATCH, 1, operands["k"].shape[2]) > 0.3
    key_mask[1] = False
    with torch.no_grad():
        operands["k"].masked_fill_(~key_mask.unsqueeze(-1), torch.nan)
    common = {"backend": backend, "causal": causal, "key_mask": key_mask}
    actual = check_against_the_definition(operands, "prf", **common, norm_coefficient=0.7)
    norms = -0.7 * operands["k"].masked_fill(~key_mask.unsqueeze(-1), 0).square().sum(-1)
    bias = operands["key_bias"]
    kernel, qkv = kernel_of("prf", operands), [operands[name] for name in ("q", "k", "v")]
    expected, _ = op.attend(kernel, *qkv, **common, key_bias=norms if bias is None else bias + norms)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("feature_map", "options"), KINDS[:3])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("backend", ["chunked", "chunked-7"])
def test_few_queries_equal_the_definition(feature_map, options, length, weighted, backend):
    check_against_the_definition(
        problem(feature_map, length=length, weighted=weighted, **options), feature_map, backend=backend
    )


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [1, 3, LENGTH])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_a_simplex_envelope_inside_the_product(backend, causal, length, weighted):
    skip_unless_served(backend, "prf", causal)
    operands = problem("prf", length=length, keys=length if causal else KEYS, weighted=weighted)
    check_against_the_definition(operands, "prf", backend=backend, causal=causal, simplex=True)


def test_the_simplex_envelope_is_that_of_the_envelopes():
    operands = problem("prf")
    inside = check_against_the_definition(operands, "prf", backend="chunked", simplex=True, key_mask=None)
    bias = simplex_envelope(operands["k"], operands["omega"])
    outside = spectral_product(**operands | {"key_bias": bias}, feature_map="prf")
    torch.testing.assert_close(inside, outside, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("feature_map", "options"), KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_gradients_are_derivatives(feature_map, options, causal):
    operands = problem(feature_map, length=4, keys=4 if causal else 3, weighted=True, **options)
    key_mask = torch.ones(BATCH, operands["k"].shape[2], dtype=torch.bool)
    key_mask[0, 1] = False
    names = [name for name, t in operands.items() if t is not None]

    def product(*inputs):
        given = operands | dict(zip(names, inputs, strict=True))
        return spectral_product(**given, feature_map=feature_map, key_mask=key_mask, causal=causal)

    assert torch.autograd.gradcheck(product, tuple(operands[name] for name in names), atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    draw = data.draw
    feature_map = draw(st.sampled_from(["rks", "prf", "elu"]))
    causal = draw(st.booleans())
    batch, heads = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    length = draw(st.integers(0, 40))
    keys = length if causal else draw(st.integers(0, 40))
    dim, values, frequencies = (draw(st.integers(1, 9)) for _ in range(3))
    rks, weighted = feature_map == "rks", draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 2**31)))
    plain = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    arguments = {
        "q": plain(batch, heads, length, dim),
        "k": plain(batch, heads, keys, dim),
        "v": plain(batch, heads, keys, values),
        "omega": None if feature_map == "elu" else plain(heads, frequencies, dim),
        "pair_offset": plain(heads, dim) if rks and draw(st.booleans()) else None,
        "key_bias": plain(batch, heads, keys) if weighted else None,
        "frequency_bias": plain(heads, frequencies) if weighted and feature_map != "elu" else None,
        "smoothing": 1.0 if rks else 0.0,
        "feature_map": feature_map,
        "key_mask": torch.rand(batch, keys) > 0.2 if draw(st.booleans()) else None,
        "causal": causal,
    }
    expected = spectral_product(**arguments, backend="reference")
    served = [name for name in FAST if "flash" not in name or (feature_map == "prf" and not causal)]
    actual = spectral_product(**arguments, backend=draw(st.sampled_from(served)))
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("feature_map", ["rks", "prf", "elu"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_mask_and_a_log_weight_of_minus_infinity_are_the_same(feature_map, causal):
    operands = problem(feature_map, keys=LENGTH)
    key_mask = torch.rand(BATCH, LENGTH) > 0.4
    key_bias = torch.zeros(BATCH, 1, LENGTH, dtype=torch.float64).masked_fill(~key_mask[:, None], -math.inf)
    with torch.no_grad():  # what is not there may hold anything
        for name in ("k", "v"):
            operands[name].masked_fill_(~key_mask[:, None, :, None], math.nan)
    common = {"feature_map": feature_map, "causal": causal}
    masked = spectral_product(**operands, **common, key_mask=key_mask)
    biased = spectral_product(**operands | {"key_bias": key_bias}, **common)
    assert torch.equal(masked, biased)
    d_out = torch.randn_like(masked)
    for one, other in zip(*(torch.autograd.grad(x, tensors(operands), d_out) for x in (masked, biased)), strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


@pytest.mark.parametrize("feature_map", ["rks", "prf", "elu"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [1, LENGTH])
@pytest.mark.parametrize("backend", ["auto", "reference", *FAST])
def test_a_log_weight_that_is_no_number_is_seen(feature_map, causal, length, backend):
    skip_unless_served(backend, feature_map, causal)
    operands = problem(feature_map, length=length, keys=length if causal else KEYS, weighted=True)
    operands = {name: None if x is None else x.detach() for name, x in operands.items()}
    operands["key_bias"][0, :, -1] = math.nan
    out = spectral_product(**operands, feature_map=feature_map, causal=causal, backend=backend)
    assert out[0, :, -1].isnan().all()
    assert out[1].isfinite().all(), "another sequence is not touched"


@pytest.mark.parametrize("feature_map", ["rks", "prf", "elu"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("spread", [100.0, 1e4])
def test_log_weights_may_be_as_far_apart_as_they_like(feature_map, causal, spread):
    operands = problem(feature_map, keys=LENGTH)
    operands["key_bias"] = (spread * torch.randn(BATCH, HEADS, LENGTH, dtype=torch.float64)).requires_grad_()
    common = {"feature_map": feature_map, "causal": causal, "smoothing": 1.0 if feature_map == "rks" else 0.0}
    expected = spectral_product(**operands, **common, backend="reference")
    actual = spectral_product(**operands, **common)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    gradients = torch.autograd.grad(actual.square().sum(), tensors(operands))
    wanted = torch.autograd.grad(expected.square().sum(), tensors(operands))
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    single = {name: None if t is None else t.float() for name, t in operands.items()}
    assert relative_error(spectral_product(**single, **common), expected) < 1e-3


@pytest.mark.parametrize(("feature_map", "options"), KINDS)
def test_decoding_takes_log_weights(feature_map, options):
    operands = problem(feature_map, length=9, keys=9, weighted=True, **options)
    smoothing = operands.pop("smoothing", None)
    expected = spectral_product(
        **operands, feature_map=feature_map, smoothing=0.0 if smoothing is None else smoothing, causal=True
    )
    kernel = SpectralKernel(
        FEATURE_MAPS[feature_map],
        omega=operands["omega"],
        pair_offset=operands["pair_offset"],
        frequency_bias=operands["frequency_bias"],
        smoothing=smoothing,
    )
    q, k, v, bias = (operands[name] for name in ("q", "k", "v", "key_bias"))
    state = decoding_state(kernel, q, v)
    for t in range(9):
        here = slice(t, t + 1)
        out, _ = state.step(q[:, :, here], k[:, :, here], v[:, :, here], bias[:, :, here])
        torch.testing.assert_close(out, expected[:, :, here], atol=1e-10, rtol=1e-10)


def decoding_state(kernel, q, v):
    sizes = {"batch_size": q.shape[0], "num_heads": q.shape[1], "value_dim": v.shape[3]}
    return DecodingState(KernelState.empty(kernel, like=q, **sizes))


def test_keys_without_weights_may_follow_keys_with_weights():
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.tensor([5.0, -3, 2, 0, 0, 0], dtype=torch.float64).expand(1, 1, 6)
    kernel = SpectralKernel(FEATURE_MAPS["rks"], torch.randn(2, 8, 4, dtype=torch.float64))
    state = decoding_state(kernel, q, v).absorb(k[:, :, :3], v[:, :, :3], key_bias=bias[..., :3])
    state.absorb(k[:, :, 3:5], v[:, :, 3:5])
    expected = spectral_product(q, k, v, kernel.omega, feature_map="rks", key_bias=bias)
    last, _ = state.step(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:])
    torch.testing.assert_close(last, expected[:, :, 5:], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(state.read(q), expected, atol=1e-10, rtol=1e-10)


def positive_features(std, *, length=257, dim=64, frequencies=256):
    scale = std * dim**-0.25
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    return scale * q, scale * k, v, torch.randn(2, frequencies, dim)


STDS = [0.01, 0.1, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def product_in_range(q, k, v, omega, *, norm_coefficient, causal, backend):
    """With the Gaussian envelope of a coefficient, or the simplex envelope where there is none."""
    kernel = SpectralKernel(
        FEATURE_MAPS["prf"], omega, simplex=norm_coefficient is None, norm_coefficient=norm_coefficient or 0.0
    )
    return op.attend(kernel, q, k, v, causal=causal, backend=backend)[0]


@functools.cache
def range_problem(std, causal, norm_coefficient):
    """Operands, what they give by definition in float64, a gradient of that and those of the operands."""
    operands = positive_features(std)
    doubles = [t.double().requires_grad_() for t in operands]
    expected = product_in_range(*doubles, norm_coefficient=norm_coefficient, causal=causal, backend="reference")
    d_out = torch.randn_like(expected)
    return operands, expected.detach(), d_out, torch.autograd.grad(expected, doubles, d_out)


def tolerance_of(std):
    return 1e-4 if std <= 4 else 1e-2


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("norm_coefficient", [1.0, 0.5, None], ids=["1", "half", "simplex"])
@pytest.mark.parametrize("backend", ["chunked", "flash_cpu"])
def test_positive_features_are_exact_over_the_whole_range(std, causal, norm_coefficient, backend):
    skip_unless_served(backend, "prf", causal)
    given, expected, d_out, wanted = range_problem(std, causal, norm_coefficient)
    operands = [t.clone().requires_grad_() for t in given]
    actual = product_in_range(*operands, norm_coefficient=norm_coefficient, causal=causal, backend=backend)
    assert relative_error(actual, expected) < tolerance_of(std)
    got = torch.autograd.grad(actual, operands, d_out.float())
    assert all(g.isfinite().all() for g in got)
    assert max(relative_error(g, w) for g, w in zip(got, wanted, strict=True)) < tolerance_of(std)


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("norm_coefficient", [1.0, 0.5, None], ids=["1", "half", "simplex"])
@pytest.mark.parametrize("way", ["step", "absorb and read"])
def test_decoding_is_exact_over_the_whole_range(monkeypatch, std, norm_coefficient, way):
    (q, k, v, omega), expected, _, _ = range_problem(std, True, norm_coefficient)
    kernel = SpectralKernel(
        FEATURE_MAPS["prf"], omega, simplex=norm_coefficient is None, norm_coefficient=norm_coefficient or 0.0
    )
    state, out = decoding_state(kernel, q, v), []
    for t in range(q.shape[2]):
        query, key, value = (x[:, :, t : t + 1] for x in (q, k, v))
        if way == "step":
            with monkeypatch.context() as patch:  # every envelope has the way of one token
                patch.setattr(DecodingState, "absorb", lambda *given, **named: pytest.fail("the long way"))
                out.append(state.step(query, key, value)[0])
        else:
            out.append(state.absorb(key, value).read(query))
    assert relative_error(torch.cat(out, 2), expected) < tolerance_of(std)


@pytest.mark.parametrize("causal", [False, True])
def test_no_mean_of_cosines_is_below_half_of_the_smoothing(causal):
    keys = 50 if causal else 6
    q, k = 3 * torch.randn(1, 1, 50, 4), 3 * torch.randn(1, 1, keys, 4)
    v, omega = torch.rand(1, 1, keys, 1), torch.randn(1, 8, 4)
    cosines = torch.cos((q[0, 0, :, None] - k[0, 0]) @ omega[0].T).mean(-1) + 0.1  # (L, S)
    seen = torch.ones(50, keys).tril() if causal else torch.ones(50, keys)
    means = (cosines * seen).sum(-1) / seen.sum(-1)
    assert 2 < (means < 0.05).sum() < 48
    out = spectral_product(q, k, v, omega, feature_map="rks", smoothing=0.1, causal=causal)[0, 0, :, 0]
    weights = (cosines + (0.05 - means).clamp(min=0)[:, None]) * seen
    torch.testing.assert_close(out, weights @ v[0, 0, :, 0] / weights.sum(-1), atol=1e-4, rtol=1e-4)
    # |numerator| <= (1 + s) sum_j |v_j|, and the denominator is at least s/2 for each key.
    assert out.abs().max() <= 1.1 / 0.05


@pytest.mark.parametrize("std", [0.01, 1.0, 8.0, 32.0])
@pytest.mark.parametrize("causal", [False, True])
def test_smoothed_rks_is_finite_and_near_over_the_range(std, causal):
    operands = [t.requires_grad_() for t in positive_features(std)]
    arguments = {"feature_map": "rks", "smoothing": 1.0, "causal": causal}
    out = spectral_product(*operands, **arguments)
    expected = spectral_product(*(t.double() for t in operands), **arguments, backend="reference")
    assert relative_error(out, expected) < 1e-4
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in operands)


def test_causal_cuts_a_chunk_only_where_it_underflows():
    # Scores that rise by 200 along the chunk: the last key is e^200 times the first for every feature.
    length, chunks_of = 64, {}
    whole = ChunkedBackend(chunk=length)
    for rise in (0.0, 200.0):
        k = torch.zeros(1, 1, length, 2)
        k[..., 0] = torch.linspace(-rise, 0, length)
        q, v, omega = torch.randn(1, 1, length, 2), torch.randn(1, 1, length, 3), torch.ones(1, 5, 2)
        out, *kept = whole.forward(Call("causal", SpectralKernel(FEATURE_MAPS["prf"], omega), q=q, k=k, v=v), keep=True)
        doubles = (t.double() for t in (q, k, v, omega))
        expected = spectral_product(*doubles, feature_map="prf", causal=True, backend="reference")
        assert relative_error(out, expected) < 1e-4
        chunks_of[rise] = kept[-1].flatten().tolist()
    assert chunks_of == {0.0: [64], 200.0: [8]}


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_only_gradients_that_are_needed_are_computed(monkeypatch, causal):
    operands = problem("rks", keys=LENGTH, paired=True, smoothing=1.0)
    asked = []
    backward = ChunkedBackend.backward

    def spy(self, call, outputs, d_results, needed):
        asked.append((call.step, set(needed)))
        gradients = backward(self, call, outputs, d_results, needed)
        parameters_given = set(gradients) & {"omega", "pair_offset", "smoothing"}
        assert parameters_given == set(needed) & {"omega", "pair_offset", "smoothing"}
        return gradients

    monkeypatch.setattr(ChunkedBackend, "backward", spy)
    parameters = ("omega", "pair_offset", "smoothing")
    for needed in [(), ("omega",), ("pair_offset",), parameters]:
        for name in parameters:
            operands[name] = operands[name].detach().requires_grad_(name in needed)
        spectral_product(**operands, feature_map="rks", causal=causal).sum().backward()
        if causal:
            assert asked == [("causal", {"q", "k", "v", *needed})]
        else:
            read, absorbed = dict(asked)["read"], dict(asked)["absorb"]
            assert read == {"q", "values", "weights", *needed}
            assert absorbed == {"k", "v", *needed}
        asked.clear()
        assert [operands[name].grad is not None for name in parameters] == [name in needed for name in parameters]


@pytest.mark.parametrize("feature_map", ["rks", "prf"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_kept_for_backward_does_not_grow_with_the_features(feature_map, causal):
    def kept(frequencies):
        sizes = []
        length = 4096
        q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
        omega = torch.randn(1, frequencies, 8)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            spectral_product(q, k, v, omega, feature_map=feature_map, causal=causal)
        return sum(sizes)

    few, many = kept(4), kept(64)
    features_of_all_tokens = 2 * 2 * 4096 * 64
    assert many - few < 0.2 * features_of_all_tokens


def test_the_op_passes_torchs_own_checks():
    q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    omega, bias = torch.randn(1, 6, 4, requires_grad=True), torch.randn(1, 1, 9, requires_grad=True)
    for feature_map in ("rks", "prf"):
        # Without smoothing a sum of cosines may have no logarithm.
        smoothing = torch.ones(1, requires_grad=True) if feature_map == "rks" else None
        kernel = SpectralKernel(FEATURE_MAPS[feature_map], omega, smoothing=smoothing)
        absorb = Call("absorb", kernel, k=k, v=v, key_bias=bias)
        with torch.no_grad():
            sums = BACKENDS["chunked"].absorb(absorb)
        read = Call("read", kernel, q=q, sums=op.Sums(*(x.clone().requires_grad_() for x in sums)))
        for call in (absorb, read, Call("causal", kernel, q=q, k=k, v=v, key_bias=bias)):
            arguments = ("chunked-7", True, call.step, *call.constants, *call.tensors().values())
            torch.library.opcheck(torch.ops.klformer.spectral_product.default, arguments)


def test_a_backend_is_chosen_by_name():
    operands = problem("prf")
    for backend in ("reference", *FAST):
        with klformer.record_backends() as served:
            out = spectral_product(**operands, feature_map="prf", backend=backend)
        assert served == Counter({("product", backend): 1})
        assert out.shape == (BATCH, HEADS, LENGTH, VALUES)
    with pytest.raises(ValueError, match="unknown backend 'chunky'; did you mean 'chunked'"):
        spectral_product(**operands, feature_map="prf", backend="chunky")
    with pytest.raises(ValueError, match="backend 'flash_cpu' can't serve this product: feature_map 'rks' is not exp"):
        spectral_product(**problem("rks"), feature_map="rks", backend="flash_cpu")
    with klformer.use_backend("reference"), klformer.record_backends() as served:
        spectral_product(**operands, feature_map="prf")
        spectral_product(**operands, feature_map="prf", backend="chunked")
    assert served == Counter({("product", "reference"): 1, ("product", "chunked"): 1})


def test_it_is_public():
    assert klformer.spectral_product is spectral_product


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 4)}, r"q must have shape \(batch, heads, length, size\)"),
        ({"q": torch.zeros(BATCH, HEADS, LENGTH, DIM, dtype=torch.long)}, "q must be of a floating-point type"),
        ({"k": torch.zeros(BATCH, HEADS, KEYS, DIM + 1)}, r"k must have shape \(batch, 3, length, 5\)"),
        ({"v": torch.zeros(BATCH, HEADS, KEYS + 1, DIM)}, "k and v the same length"),
        ({"omega": None}, "'rks' needs frequencies"),
        ({"feature_map": "elu"}, "'elu' takes no frequencies"),
        ({"feature_map": "cosine"}, "unknown feature map 'cosine'"),
        ({"omega": torch.zeros(2, FREQUENCIES, DIM)}, r"omega must be floating-point of shape \(3 or 1, R, 5\)"),
        ({"omega": torch.zeros(HEADS, 0, DIM)}, "omega must have at least one frequency"),
        ({"pair_offset": torch.zeros(2, DIM)}, "pair_offset must be"),
        ({"pair_offset": torch.zeros(HEADS, 1)}, "pair_offset must be"),
        (
            {"feature_map": "prf", "pair_offset": torch.zeros(HEADS, DIM)},
            "pair_offset goes with feature_map 'rks' only",
        ),
        ({"frequency_bias": torch.zeros(HEADS, DIM)}, r"frequency_bias must be .* \(3 or 1, 11\)"),
        ({"feature_map": "elu", "omega": None, "frequency_bias": torch.zeros(HEADS, DIM)}, "'elu' does not have"),
        ({"key_bias": torch.zeros(BATCH, KEYS)}, r"key_bias must be floating-point and \(2 or 1, 3 or 1, 29\)"),
        ({"key_bias": torch.zeros(BATCH, 1, KEYS, dtype=torch.bool)}, "key_bias must be floating-point"),
        ({"smoothing": float("nan")}, "smoothing must be at least 0"),
        ({"smoothing": -1.0}, "smoothing must be at least 0"),
        ({"smoothing": torch.ones(2)}, r"smoothing must be floating-point of shape \(3 or 1\)"),
        ({"smoothing": torch.tensor([0.1, 0.0, 0.1])}, "smoothing must be above 0 and finite for every head, got"),
        ({"smoothing": torch.tensor([-0.1])}, "smoothing must be above 0 and finite"),
        ({"smoothing": torch.tensor([math.nan])}, "smoothing must be above 0 and finite"),
        ({"smoothing": torch.tensor([math.inf])}, "smoothing must be above 0 and finite"),
        ({"feature_map": "prf", "smoothing": 1.0}, "smoothing must be 0 for feature_map 'prf'"),
        ({"causal": True}, "causal needs as many queries as keys"),
        ({"key_mask": torch.ones(BATCH, LENGTH, dtype=torch.bool)}, "key_mask must be a bool tensor"),
    ],
)
def test_impossible_arguments_are_named(change, message):
    arguments = problem("rks") | {"feature_map": "rks"} | change
    with pytest.raises(ValueError, match=message):
        spectral_product(**arguments)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_several_threads_give_what_one_gives(causal):
    # With several threads the features of a causal product are made in another way.
    q, k, v, omega = (torch.randn(shape, dtype=torch.float64) for shape in [(1, 2, 70, 4)] * 3 + [(2, 6, 4)])
    call = functools.partial(spectral_product, q, k, v, omega, feature_map="rks", smoothing=0.1, causal=causal)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = call()
        torch.set_num_threads(2)
        torch.testing.assert_close(call(), wanted, atol=1e-12, rtol=0)
    finally:
        torch.set_num_threads(before)
