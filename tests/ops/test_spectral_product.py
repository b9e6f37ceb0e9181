"""The product against its quadratic definition: backends, chunks, maps, weights, precision, memory of what it keeps."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import relative_error

import klformer
from klformer.errors import ArgumentError
from klformer.ops import spectral_product as op
from klformer.ops.envelopes import gaussian_envelope, simplex_envelope
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS, backends, chunked, spectral_product
from klformer.ops.spectral_product.chunked import ChunkedBackend, few, positive
from klformer.ops.spectral_product.decoding import PreparedKernel
from klformer.ops.spectral_product.operands import SpectralKernel
from klformer.ops.spectral_product.softmax_pair import SoftmaxPairBackend

BATCH, HEADS, LENGTH, KEYS, DIM, VALUES, FREQUENCIES = 2, 3, 37, 29, 5, 7, 11
#: The chunked backend at awkward chunks.
CHUNKED = {f"chunked-{chunk}": chunk for chunk in (1, 7, LENGTH)}
for _name, _chunk in CHUNKED.items():
    BACKENDS.add(_name, ChunkedBackend(_name, chunk=_chunk))
#: Every backend that computes fast; each must give what the definition gives.
FAST = [name for name in BACKENDS if name not in ("reference", "inference")]


def skip_unless_served(backend, feature_map, causal):
    if backend.startswith("softmax_pair") and (feature_map != "prf" or causal):
        pytest.skip("softmax_pair is for bidirectional products of exponential maps")


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


def check_against_the_definition(operands, feature_map, *, backend, causal=False, simplex=False, key_mask="random"):
    """Results and gradients are those of the reference; one sequence of the batch has no key at all."""
    if isinstance(key_mask, str):
        key_mask = torch.rand(BATCH, 1, operands["k"].shape[2]) > 0.3
        key_mask[1] = False
    q, k, v, bias = (operands[name] for name in ("q", "k", "v", "key_bias"))
    names = ("omega", "pair_offset", "frequency_bias", "smoothing")
    kernel = SpectralKernel(FEATURE_MAPS[feature_map], **{n: operands.get(n) for n in names}, simplex=simplex)
    call = op.SpectralOperands(kernel, q, k, v, key_mask=key_mask, key_bias=bias, causal=causal)
    expected, actual = op.attend(call, backend="reference"), op.attend(call, backend=backend)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    inputs, d_out = tensors(operands), torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, d_out)
    for got, want in zip(torch.autograd.grad(actual, inputs, d_out), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)
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
@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_the_envelope_of_norms_is_a_weight_of_the_keys(monkeypatch, causal, weighted, backend):
    """As a number it is what the same weights written out are, also where keys that are not there hold no numbers."""
    skip_unless_served(backend, "prf", causal)
    monkeypatch.setattr(backends, "_KEYS_AT_A_TIME", 5)
    operands = problem("prf", keys=LENGTH if causal else KEYS, weighted=weighted)
    q, k, v, omega, bias = (operands[name] for name in ("q", "k", "v", "omega", "key_bias"))
    key_mask = torch.rand(BATCH, 1, k.shape[2]) > 0.3
    key_mask[1] = False
    with torch.no_grad():
        k.masked_fill_(~key_mask.unsqueeze(-1), torch.nan)
    norms = -0.7 * k.masked_fill(~key_mask.unsqueeze(-1), 0).square().sum(-1)
    kernel = SpectralKernel(FEATURE_MAPS["prf"], omega, frequency_bias=operands["frequency_bias"])
    call = op.SpectralOperands(kernel, q, k, v, key_mask=key_mask, key_bias=bias, causal=causal)
    written_out = replace(call, key_bias=norms if bias is None else bias + norms)
    expected = op.attend(written_out, backend="reference")
    actual = op.attend(replace(call, norm_coefficient=0.7), backend=backend)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    inputs, d_out = tensors(operands), torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, d_out)
    for got, want in zip(torch.autograd.grad(actual, inputs, d_out), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("feature_map", "options"), KINDS[:3])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("backend", ["chunked", "chunked-7"])
def test_few_queries_equal_the_definition(monkeypatch, feature_map, options, length, weighted, backend):
    monkeypatch.setattr(few, "VALUES_PER_QUERY", {"rks": 1, "prf": 1})
    check_against_the_definition(
        problem(feature_map, length=length, weighted=weighted, **options), feature_map, backend=backend
    )


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [1, 3, LENGTH])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_a_simplex_envelope_inside_the_product(monkeypatch, backend, causal, length, weighted):
    skip_unless_served(backend, "prf", causal)
    monkeypatch.setattr(few, "VALUES_PER_QUERY", {"prf": 1})
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
    served = [name for name in FAST if "softmax" not in name or (feature_map == "prf" and not causal)]
    actual = spectral_product(**arguments, backend=draw(st.sampled_from([*served, "inference"])))
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
@pytest.mark.parametrize("backend", ["auto", "inference", "reference", *FAST])
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
    prepared = PreparedKernel.of(kernel, num_heads=HEADS, head_dim=DIM, like=q)
    state = prepared.initial_state(BATCH, VALUES)
    for t in range(9):
        here = slice(t, t + 1)
        prepared.absorb(state, k[:, :, here], v[:, :, here], key_bias=bias[:, :, here])
        out = prepared.read(state, q[:, :, here])
        torch.testing.assert_close(out, expected[:, :, here], atol=1e-10, rtol=1e-10)


def test_keys_without_weights_may_follow_keys_with_weights():
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.tensor([5.0, -3, 2, 0, 0, 0], dtype=torch.float64).expand(1, 1, 6)
    kernel = SpectralKernel(FEATURE_MAPS["rks"], torch.randn(2, 8, 4, dtype=torch.float64))
    prepared = PreparedKernel.of(kernel, num_heads=2, head_dim=4, like=q)
    state = prepared.initial_state(1, 4)
    prepared.absorb(state, k[:, :, :3], v[:, :, :3], key_bias=bias[..., :3])
    prepared.absorb(state, k[:, :, 3:], v[:, :, 3:])
    expected = spectral_product(q, k, v, kernel.omega, feature_map="rks", key_bias=bias)
    torch.testing.assert_close(prepared.read(state, q), expected, atol=1e-10, rtol=1e-10)


def positive_features(std, *, length=257, dim=64, frequencies=256):
    scale = std * dim**-0.25
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    return scale * q, scale * k, v, torch.randn(2, frequencies, dim)


STDS = [0.01, 0.1, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def product_in_range(q, k, v, omega, *, norm_coefficient, causal, backend):
    """With the Gaussian envelope of a coefficient, or the simplex envelope where there is none."""
    kernel = SpectralKernel(FEATURE_MAPS["prf"], omega, simplex=norm_coefficient is None)
    bias = None if norm_coefficient is None else gaussian_envelope(k, norm_coefficient)
    return op.attend(op.SpectralOperands(kernel, q, k, v, key_bias=bias, causal=causal), backend=backend)


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
@pytest.mark.parametrize("backend", ["chunked", "few", "softmax_pair", "inference"])
def test_positive_features_are_exact_over_the_whole_range(monkeypatch, std, causal, norm_coefficient, backend):
    skip_unless_served(backend, "prf", causal)
    if backend == "few":
        if causal:
            pytest.skip("a few queries are bidirectional")
        monkeypatch.setattr(few, "serves", lambda operands: True)  # also for so many
    given, expected, d_out, wanted = range_problem(std, causal, norm_coefficient)
    operands = [t.clone().requires_grad_(backend != "inference") for t in given]
    actual = product_in_range(
        *operands, norm_coefficient=norm_coefficient, causal=causal, backend="chunked" if backend == "few" else backend
    )
    assert relative_error(actual, expected) < tolerance_of(std)
    if backend == "inference":
        return
    got = torch.autograd.grad(actual, operands, d_out.float())
    assert all(g.isfinite().all() for g in got)
    assert max(relative_error(g, w) for g, w in zip(got, wanted, strict=True)) < tolerance_of(std)


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("norm_coefficient", [1.0, 0.5, None], ids=["1", "half", "simplex"])
@pytest.mark.parametrize("way", ["step", "absorb and read"])
def test_decoding_is_exact_over_the_whole_range(monkeypatch, std, norm_coefficient, way):
    (q, k, v, omega), expected, _, _ = range_problem(std, True, norm_coefficient)
    kernel = SpectralKernel(FEATURE_MAPS["prf"], omega, simplex=norm_coefficient is None)
    prepared = PreparedKernel.of(kernel, num_heads=2, head_dim=q.shape[-1], like=q)
    state, out = prepared.initial_state(1, v.shape[-1]), []
    for t in range(q.shape[2]):
        query, key, value = (x[:, :, t : t + 1] for x in (q, k, v))
        bias = None if norm_coefficient is None else gaussian_envelope(key, norm_coefficient)
        if way == "step":
            with monkeypatch.context() as patch:  # every envelope has the way of one token
                patch.setattr(PreparedKernel, "absorb", lambda *given, **named: pytest.fail("the long way"))
                out.append(prepared.step(state, query, key, value, bias))
        else:
            prepared.absorb(state, key, value, key_bias=bias)
            out.append(prepared.read(state, query))
    assert relative_error(torch.cat(out, 2), expected) < tolerance_of(std)


def test_a_smoothing_of_zero_that_could_not_be_seen_has_gradients(monkeypatch):
    """As on a GPU, which is not asked what a tensor holds: few queries do not divide by it."""
    monkeypatch.setattr(few, "VALUES_PER_QUERY", {"rks": 1})
    q, k, v = (normal(1, 2, n, 4) for n in (3, 20, 20))
    smoothing = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    kernel = SpectralKernel(FEATURE_MAPS["rks"], torch.randn(2, 6, 4, dtype=torch.float64), smoothing=smoothing)
    call = op.SpectralOperands(kernel, q, k, v)
    assert few.serves(call)
    found = torch.autograd.grad(op.attend(call, backend="chunked").sum(), (q, k, v, smoothing))
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_guess_that_is_good_is_not_made_again(monkeypatch, dtype):
    """Half-precision results whose sum is no number of their type."""
    reads = []
    read = positive.read_queries
    monkeypatch.setattr(
        positive, "read_queries", lambda *given, **how: reads.append(how.get("exact", True)) or read(*given, **how)
    )
    q, k = (torch.randn(1, 1, 100, 8, dtype=dtype) for _ in range(2))
    v = torch.full((1, 1, 100, 8), 300.0, dtype=dtype)
    out = spectral_product(q, k, v, torch.randn(1, 16, 8), feature_map="prf", backend="chunked")
    torch.testing.assert_close(out, v)
    assert reads == [False]


def test_padding_at_the_beginning_costs_no_pass_in_vain(monkeypatch):
    chunks = []
    of_keys = positive.Scores.of_keys
    monkeypatch.setattr(
        positive.Scores, "of_keys", lambda self, start, *given: chunks.append(start) or of_keys(self, start, *given)
    )
    operands = problem("prf")
    key_mask = torch.arange(KEYS).expand(BATCH, KEYS) >= torch.tensor([[0], [9]])
    product = functools.partial(spectral_product, **operands, feature_map="prf", key_mask=key_mask)
    torch.testing.assert_close(product(backend="chunked-7"), product(backend="reference"), atol=1e-10, rtol=1e-10)
    # Both sequences are worked on together, and the second begins with a chunk of nothing.
    assert chunks == [0, *range(0, KEYS, 7)]


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
    whole = ChunkedBackend("chunked", chunk=length)
    for rise in (0.0, 200.0):
        k = torch.zeros(1, 1, length, 2)
        k[..., 0] = torch.linspace(-rise, 0, length)
        q, v, omega = torch.randn(1, 1, length, 2), torch.randn(1, 1, length, 3), torch.ones(1, 5, 2)
        kernel = SpectralKernel(FEATURE_MAPS["prf"], omega)
        out, *kept = whole.forward(op.SpectralOperands(kernel, q, k, v, causal=True))
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

    def spy(self, operands, saved, d_out, needed):
        gradients = backward(self, operands, saved, d_out, needed)
        asked.append(set(gradients))
        return gradients

    monkeypatch.setattr(ChunkedBackend, "backward", spy)
    parameters = ("omega", "pair_offset", "smoothing")
    for needed in [(), ("omega",), ("pair_offset",), parameters]:
        for name in parameters:
            operands[name] = operands[name].detach().requires_grad_(name in needed)
        spectral_product(**operands, feature_map="rks", causal=causal).sum().backward()
        assert asked.pop() == {"q", "k", "v", *needed}
        assert [operands[name].grad is not None for name in parameters] == [name in needed for name in parameters]


@pytest.mark.parametrize("feature_map", ["rks", "prf"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_kept_for_backward_does_not_grow_with_the_features(monkeypatch, feature_map, causal):
    monkeypatch.setattr(chunked, "KEEP_BYTES", 0)  # no sequence is short

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
    for feature_map, causal in [("rks", False), ("rks", True), ("prf", False), ("prf", True)]:
        arguments = ([q, k, v, omega, bias], "q,k,v,omega,key_bias", feature_map, causal, "chunked-7")
        torch.library.opcheck(torch.ops.klformer.spectral_product.default, arguments)


def test_a_backend_is_chosen_by_name():
    operands = problem("prf")
    with torch.no_grad():
        results = [spectral_product(**operands, feature_map="prf", backend=backend) for backend in BACKENDS]
    assert all(torch.allclose(result, results[0]) for result in results)
    with pytest.raises(ValueError, match="backend 'inference' can't compute"):
        spectral_product(**operands, feature_map="prf", backend="inference")
    for backend in FAST:
        assert spectral_product(**operands, feature_map="prf", backend=backend).shape == (BATCH, HEADS, LENGTH, VALUES)
    with pytest.raises(ValueError, match="unknown backend 'chunky'; did you mean 'chunked'"):
        spectral_product(**operands, feature_map="prf", backend="chunky")


def test_a_backend_may_refuse(monkeypatch):
    operands = problem("prf")
    monkeypatch.setattr(ChunkedBackend, "supports", lambda self, operands: operands.feature_map.name != "prf")
    with pytest.raises(
        ValueError, match="backend 'chunked' can't compute a bidirectional product with feature_map 'prf'"
    ):
        spectral_product(**operands, feature_map="prf", backend="chunked")
    expected = spectral_product(**operands, feature_map="prf", backend="reference")
    assert torch.equal(spectral_product(**operands, feature_map="prf"), expected), "auto takes one that can"


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


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_inference_with_a_simplex_envelope_through_torchs_kernels(monkeypatch, weighted):
    """As on CUDA: what suits there is taken here."""
    monkeypatch.setattr(SoftmaxPairBackend, "suits", SoftmaxPairBackend.supports)
    monkeypatch.setattr(ChunkedBackend, "forward", lambda self, operands: pytest.fail("the chunked product"))
    operands = {name: None if x is None else x.detach() for name, x in problem("prf", weighted=weighted).items()}
    q, k, v, bias = (operands[name] for name in ("q", "k", "v", "key_bias"))
    kernel = SpectralKernel(
        FEATURE_MAPS["prf"], operands["omega"], frequency_bias=operands["frequency_bias"], simplex=True
    )
    call = op.SpectralOperands(kernel, q, k, v, key_mask=torch.rand(BATCH, 1, KEYS) > 0.3, key_bias=bias)
    expected = op.attend(call, backend="reference")
    torch.testing.assert_close(op.attend(call, backend="inference"), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_features_are_kept_or_made_again_as_asked(recompute):
    q, k, v = (torch.randn(2, 3, 40, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    omega = torch.randn(3, 16, 8, dtype=torch.float64)
    saved = []

    def count(x):
        saved.append(x.numel())
        return x

    def gradients(choice):
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            out = op.spectral_product(q, k, v, omega, feature_map="rks", smoothing=1.0, recompute=choice)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    for x, y in zip(gradients(recompute), gradients("auto"), strict=True):
        torch.testing.assert_close(x, y)
    saved.clear()
    gradients(recompute)
    assert (saved.count(2 * 3 * 32 * 40) >= 2) == (recompute == "never")


def test_recompute_is_refused_where_it_means_nothing():
    q = torch.randn(1, 1, 4, 2)
    with pytest.raises(ArgumentError, match="recompute"):
        op.spectral_product(q, q, q, torch.randn(1, 3, 2), feature_map="rks", recompute="sometimes")
    with pytest.raises(ArgumentError, match="backend 'chunked'"):
        op.spectral_product(q, q, q, torch.randn(1, 3, 2), feature_map="rks", recompute="never", backend="reference")
    for feature_map, causal, kind in (("rks", True, "causal"), ("prf", False, "prf")):
        common = {"feature_map": feature_map, "causal": causal}
        with pytest.raises(ArgumentError, match=f"features of a {kind} product are always made again"):
            op.spectral_product(q, q, q, torch.randn(1, 3, 2), **common, recompute="never")
        op.spectral_product(q, q, q, torch.randn(1, 3, 2), **common, recompute="always")


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
