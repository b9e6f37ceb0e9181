"""Contracts of every attention, and what those of the paper must do besides."""

import pytest
import torch
from oracles import by_definition
from support import HEAD_DIM, HEADS, build, half_masked, operands, problem, relative_error

import klformer
from klformer.kernels import exact
from klformer.testing.contracts import *  # noqa: F403
from klformer.testing.subjects import NAMES, every_direction


def test_names_of_the_paper():
    learned = {"gmm-rks", "fastfood-rks", "generative-rks", "gmm-prf", "fastfood-prf", "generative-prf"}
    ours = {"atoms-rks", "atoms-prf"}
    fixed = {"rbf-rks", "performer", "linear-elu", "hedgehog", "softmax"}
    others = {"synthesizer", "sinkhorn", "sparse", "reformer", "local", "longformer", "linformer", "bigbird"}
    assert set(NAMES) == learned | ours | fixed | others


@every_direction
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_equals_its_definition(name, causal, masked):
    mechanism, x = problem(name, causal=causal)
    key_mask = half_masked(keys=x.k.shape[2]) if masked else None
    expected = by_definition(mechanism, *x, key_mask=key_mask, causal=causal)
    actual = mechanism(*x, key_mask=key_mask, causal=causal)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


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
        ("rbf-rks", {}, exact.gaussian_kernel(*scaled) + 0.1),
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


@pytest.mark.parametrize("name", ["gmm-rks", "hedgehog"])
def test_features_want_the_right_shape_and_role(name):
    mechanism = build(name)
    with pytest.raises(ValueError, match="role must be one of 'query', 'key', got 'kye'"):
        mechanism.features(operands().q, role="kye")
    with pytest.raises(ValueError, match="x must have shape"):
        mechanism.features(operands(heads=1).q, "query")
