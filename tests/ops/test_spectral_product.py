"""The fused product against the quadratic oracle: chunks, maps, precision, memory of what it keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import relative_error

from klformer.ops import causal as causal_ops
from klformer.ops import reference
from klformer.ops.spectral_product import spectral_product

BATCH, HEADS, LENGTH, KEYS, DIM, VALUES, FREQUENCIES = 2, 3, 37, 29, 5, 7, 11


def problem(feature_map, *, tied=False, length=LENGTH, keys=KEYS, shared=False):
    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    heads = 1 if shared else HEADS
    return {
        "q": normal(BATCH, HEADS, length, DIM),
        "k": normal(BATCH, HEADS, keys, DIM),
        "v": normal(BATCH, HEADS, keys, VALUES),
        "omega": None if feature_map == "elu" else normal(heads, FREQUENCIES, DIM),
        "mean": normal(heads, DIM) if tied else None,
    }


def oracle(q, k, v, omega, *, feature_map, mean=None, key_mask=None, norm_coefficient=1.0, smoothing=0.0, causal=False):
    if feature_map == "prf":
        logs = reference.log_positive_kernel(q, k, omega, norm_coefficient)
        return reference.attention_from_log_kernel(logs, v, key_mask=key_mask, causal=causal)
    kernel = reference.kernel_matrix(q, k, omega, feature_map=feature_map, mean=mean, smoothing=smoothing)
    return reference.attention_from_kernel(kernel, v, key_mask=key_mask, causal=causal)


KINDS = [
    pytest.param("rks", {"smoothing": 1.0}, id="rks"),
    pytest.param("rks", {"smoothing": 0.3, "tied": True}, id="rks-tied"),
    pytest.param("prf", {}, id="prf"),
    pytest.param("prf", {"norm_coefficient": 0.5}, id="prf-softmax"),
    pytest.param("elu", {}, id="elu"),
]


@pytest.mark.parametrize(("feature_map", "options"), KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["per-head", "shared"])
@pytest.mark.parametrize("chunk", [1, 7, LENGTH, None])
def test_equals_the_oracle_with_gradients(feature_map, options, causal, shared, chunk):
    options = dict(options)
    operands = problem(feature_map, tied=options.pop("tied", False), keys=LENGTH if causal else KEYS, shared=shared)
    key_mask = torch.rand(BATCH, operands["k"].shape[2]) > 0.3
    key_mask[1] = False
    arguments = {"feature_map": feature_map, "key_mask": key_mask, "causal": causal, **options}
    expected = oracle(**operands, **arguments)
    actual = spectral_product(**operands, **arguments, chunk=chunk)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    inputs = [t for t in operands.values() if t is not None]
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, weights)
    for got, want in zip(torch.autograd.grad(actual, inputs, weights), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


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
    tied = feature_map == "rks" and draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 2**31)))
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    operands = {
        "q": normal(batch, heads, length, dim),
        "k": normal(batch, heads, keys, dim),
        "v": normal(batch, heads, keys, values),
        "omega": None if feature_map == "elu" else normal(heads, frequencies, dim),
        "mean": normal(heads, dim) if tied else None,
    }
    arguments = {
        "feature_map": feature_map,
        "causal": causal,
        "key_mask": torch.rand(batch, keys) > 0.3 if draw(st.booleans()) else None,
        "smoothing": 1.0 if feature_map == "rks" else 0.0,
    }
    chunk = draw(st.sampled_from([None, 1, 2, 5, 16, 64]))
    expected = oracle(**operands, **arguments)
    torch.testing.assert_close(spectral_product(**operands, **arguments, chunk=chunk), expected, atol=1e-9, rtol=1e-9)


def positive_features(std, *, length=257, dim=64, frequencies=256):
    scale = std * dim**-0.25
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    return scale * q, scale * k, v, torch.randn(2, frequencies, dim)


@pytest.mark.parametrize("std", [0.01, 0.1, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_coefficient", [1.0, 0.5])
def test_positive_features_are_exact_over_the_whole_range(std, causal, norm_coefficient):
    operands = [t.requires_grad_() for t in positive_features(std)]
    doubles = [t.detach().double().requires_grad_() for t in operands]
    arguments = {"feature_map": "prf", "norm_coefficient": norm_coefficient, "causal": causal}
    actual, expected = spectral_product(*operands, **arguments), oracle(*doubles, **arguments)
    tolerance = 1e-4 if std <= 4 else 1e-2
    assert relative_error(actual, expected) < tolerance
    weights = torch.randn_like(actual)
    got = torch.autograd.grad(actual, operands, weights)
    wanted = torch.autograd.grad(expected, doubles, weights.double())
    assert all(g.isfinite().all() for g in got)
    assert max(relative_error(g, w) for g, w in zip(got, wanted, strict=True)) < tolerance


@pytest.mark.parametrize("std", [0.01, 1.0, 8.0, 32.0])
@pytest.mark.parametrize("causal", [False, True])
def test_smoothed_rks_is_finite_and_near_over_the_range(std, causal):
    operands = [t.requires_grad_() for t in positive_features(std)]
    out = spectral_product(*operands, feature_map="rks", smoothing=1.0, causal=causal)
    expected = oracle(*(t.double() for t in operands), feature_map="rks", smoothing=1.0, causal=causal)
    assert relative_error(out, expected) < 1e-4
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in operands)


def test_causal_cuts_a_chunk_only_where_it_underflows():
    # Scores that rise by 200 along the chunk: the last key is e^200 times the first for every feature.
    length, cut_of = 64, {}
    for rise in (0.0, 200.0):
        k = torch.zeros(1, 1, length, 2)
        k[..., 0] = torch.linspace(-rise, 0, length)
        q, v = torch.randn(1, 1, length, 2), torch.randn(1, 1, length, 3)
        omega = torch.ones(1, 5, 2)
        operands = {
            "q": q,
            "k": k,
            "v": v,
            "omega": omega,
            "feature_map": "prf",
            "norm_coefficient": 0.0,
            "causal": True,
        }
        expected = oracle(**{n: t.double() if isinstance(t, torch.Tensor) else t for n, t in operands.items()})
        assert relative_error(spectral_product(**operands, chunk=length), expected) < 1e-4
        results = torch.ops.klformer.spectral_product(q, k, v, omega, None, None, "prf", 0.0, 0.0, True, length)
        cut_of[rise] = int(results[6].sum())
    assert cut_of[0.0] == 1
    assert 1 < cut_of[200.0] < 20


def test_frequencies_get_no_gradient_unless_they_need_one(monkeypatch):
    operands = problem("rks")
    operands["omega"] = operands["omega"].detach()
    asked = []
    backward = causal_ops.backward

    def spy(*arguments):
        asked.append(arguments[-1])
        return backward(*arguments)

    monkeypatch.setattr(causal_ops, "backward", spy)
    operands["k"], operands["v"] = (torch.randn(BATCH, HEADS, LENGTH, n, dtype=torch.float64) for n in (DIM, VALUES))
    for needed in (False, True):
        operands["omega"].requires_grad_(needed)
        spectral_product(**operands, feature_map="rks", smoothing=1.0, causal=True).sum().backward()
        assert (operands["omega"].grad is not None) == needed
    assert asked == [False, True]


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
    omega = torch.randn(1, 6, 4, requires_grad=True)
    for feature_map, causal in [("rks", False), ("rks", True), ("prf", False), ("prf", True)]:
        arguments = (q, k, v, omega, None, None, feature_map, 1.0, 0.0, causal, 4)
        torch.library.opcheck(torch.ops.klformer.spectral_product.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 4)}, "q must have 4 dimensions"),
        ({"q": torch.zeros(BATCH, HEADS, LENGTH, DIM, dtype=torch.long)}, "floating-point"),
        ({"k": torch.zeros(BATCH, HEADS, KEYS, DIM + 1)}, "must agree in B, H, S and D"),
        ({"omega": None}, "'rks' needs frequencies"),
        ({"feature_map": "elu"}, "'elu' takes no frequencies"),
        ({"feature_map": "cosine"}, "feature_map must be one of rks, prf, elu, got 'cosine'"),
        ({"omega": torch.zeros(2, FREQUENCIES, DIM)}, r"omega must be \(3 or 1, R, 5\)"),
        ({"omega": torch.zeros(HEADS, 0, DIM)}, "with R >= 1"),
        ({"mean": torch.zeros(2, DIM)}, "mean must be"),
        ({"mean": torch.zeros(HEADS, 1)}, "mean must be"),
        ({"smoothing": float("nan")}, "smoothing must be >= 0"),
        ({"smoothing": -1.0}, "smoothing must be >= 0"),
        ({"feature_map": "prf", "smoothing": 1.0}, "smoothing must be >= 0, and 0 for 'prf'"),
        ({"causal": True}, "causal needs as many queries as keys"),
        ({"key_mask": torch.ones(BATCH, LENGTH, dtype=torch.bool)}, "key_mask must be a bool tensor"),
        ({"chunk": 0}, "chunk must be at least 1"),
    ],
)
def test_impossible_arguments_are_named(change, message):
    arguments = problem("rks") | {"feature_map": "rks"} | change
    with pytest.raises(ValueError, match=message):
        spectral_product(**arguments)
