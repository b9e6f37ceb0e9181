"""Options of kernels against their definitions: envelopes, weights, smoothing, temperature, couplings, a draw kept."""

import math
from copy import deepcopy

import pytest
import torch
from support import BATCH, HEAD_DIM, HEADS, build, half_masked, operands, relative_error

import klformer
from klformer.kernels import (
    FastFoodSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    GenerativeSpectrum,
    Kernel,
    exact,
)
from klformer.kernels.coupling import draw_noise
from klformer.kernels.kernel import LEAST_SMOOTHING
from klformer.ops.envelopes import simplex_envelope
from klformer.ops.spectral_product import attend
from klformer.testing.subjects import NAMES

VARIANTS = [
    ("gmm-prf", {"envelope": "simplex"}),
    ("gmm-prf", {"envelope": "matched"}),
    ("performer", {"envelope": "matched"}),
    ("fastfood-prf", {"envelope": "simplex", "coupling": "antithetic"}),
    ("generative-prf", {"envelope": "simplex", "coupling": "orthogonal"}),
    ("atoms-prf", {}),
    ("atoms-prf", {"envelope": "gaussian", "start": "gmm", "lengthscale": 2.0}),
    ("atoms-rks", {"start": "fastfood"}),
    ("atoms-rks", {"start": "gaussian"}),
    ("gmm-rks", {"tied": False, "weights": "learned", "num_components": 2}),
    ("gmm-prf", {"tied": False, "weights": "learned", "num_components": 2, "learn_temperature": True}),
    ("gmm-prf", {"tied": True, "weights": "learned"}),
    ("gmm-rks", {"smoothing": 0.5, "learn_smoothing": True, "learn_temperature": True}),
    ("rbf-rks", {"smoothing": 0.5, "learn_smoothing": True, "coupling": "orthogonal"}),
]
every_variant = pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=[f"{name}:{','.join(map(str, options.values()))}" for name, options in VARIANTS]
)


def moved(mechanism):
    """The mechanism with every parameter away from its start: equal weights and the like hide mistakes."""
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mechanism


def by_features(mechanism, x, key_mask, causal):
    weights = mechanism.features(x.q, "query") @ mechanism.features(x.k, "key").transpose(-1, -2)
    visible = torch.ones(x.q.shape[2], x.k.shape[2], dtype=torch.bool)
    visible = (visible.tril() if causal else visible) & key_mask[:, None, None]
    weights = weights.masked_fill(~visible, 0)
    return weights @ x.v / weights.sum(-1, keepdim=True).masked_fill(~visible.any(-1, keepdim=True), 1)


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_attention_is_what_the_features_say(name, options, causal):
    # With so much smoothing no mean of a kernel needs to be raised, which features do not show.
    enough = {"smoothing": 1.0} if "smoothing" in klformer.attention_options(name) else {}
    mechanism, x = moved(build(name, **(enough | options))), operands(causal=causal)
    key_mask = half_masked(keys=x.k.shape[2])
    expected = by_features(mechanism, x, key_mask, causal)
    padding = ~key_mask[:, None, :, None]
    x.k, x.v = x.k.masked_fill(padding, math.nan), x.v.masked_fill(padding, math.nan)
    x.require_grad()
    out = mechanism(*x, key_mask=key_mask, causal=causal)
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=1e-9)
    out.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (*x, *mechanism.parameters()))


@every_variant
def test_gradients(name, options):
    few = {"num_frequencies": 6} | options
    mechanism = moved(klformer.build_attention(name, num_heads=2, head_dim=3, **few).double())
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(*inputs):
        return mechanism(*inputs[:3])

    assert torch.autograd.gradcheck(attend, (q, k, v, *mechanism.parameters()), atol=1e-6)


@every_variant
def test_steps_equal_the_causal_sequence(name, options):
    mechanism, x = moved(build(name, **options)).eval(), operands(causal=True)
    expected, state = mechanism(*x, causal=True), mechanism.initial_state(BATCH)
    for t in range(x.q.shape[2]):
        out, state = mechanism.step(*(s[:, :, t : t + 1] for s in x), state)
        torch.testing.assert_close(out, expected[:, :, t : t + 1], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("std", [0.01, 0.1, 1.0, 4.0, 32.0])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_atoms_on_the_simplex_are_exact_over_the_whole_range(std, causal):
    """Against the definition in float64, with gradients, where some keys are padding."""
    mechanism = moved(klformer.build_attention("atoms-prf", num_heads=2, head_dim=32, num_frequencies=64))
    q, k, v = (scale * torch.randn(1, 2, 129, 32) for scale in (std, std, 1.0))
    key_mask = torch.rand(1, 129) < 0.7
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = mechanism(*inputs, key_mask=key_mask, causal=causal)
    oracle = deepcopy(mechanism).double()
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    present = oracle.kernel.present()
    assert present.simplex
    expected, _ = attend(present, *doubles, key_mask=key_mask[:, None], causal=causal, backend="reference")
    assert relative_error(out, expected) < 1e-4
    d_out = torch.randn_like(out)
    got = torch.autograd.grad(out, (*inputs, *mechanism.parameters()), d_out)
    wanted = torch.autograd.grad(expected, (*doubles, *oracle.parameters()), d_out.double())
    assert max(relative_error(g, w) for g, w in zip(got, wanted, strict=True)) < 1e-4


def test_features_of_a_key_on_the_simplex_have_a_constant_sum():
    mechanism, x = moved(build("gmm-prf", envelope="simplex")), operands(std=3.0)
    assert mechanism.kernel.spectrum.log_weights() is None
    features = mechanism.features(x.k, "key")
    torch.testing.assert_close(features.sum(-1), torch.full_like(features[..., 0], features.shape[-1] ** 0.5))


def test_the_simplex_envelope_takes_long_sequences_in_pieces():
    x, omega = torch.randn(1, 2, 3000, 4, dtype=torch.float64), torch.randn(2, 300, 4, dtype=torch.float64)
    x.requires_grad_()
    omega.requires_grad_()
    out = simplex_envelope(x, omega)
    expected = -((x @ omega.transpose(-1, -2)).logsumexp(-1) - math.log(300))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    d_out = torch.randn_like(out)
    for got, want in zip(*(torch.autograd.grad(y, (x, omega), d_out) for y in (out, expected)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


def test_the_simplex_op_passes_torchs_own_checks():
    x, omega = torch.randn(1, 2, 9, 4, requires_grad=True), torch.randn(1, 6, 4, requires_grad=True)
    mask = torch.ones(1, 1, 9, dtype=torch.bool)
    for arguments in ((x, omega, None), (x, omega, mask)):
        torch.library.opcheck(torch.ops.klformer.log_sum_of_features.default, arguments)


def test_the_matched_envelope_is_right_for_a_scaled_gaussian():
    """Positive features of M^T n estimate exp(Mq.Mk) with exp(-|Mx|^2 / 2), and not with the paper's envelope."""
    q, k = (0.15 * torch.randn(1, 1, length, 8, dtype=torch.float64) for length in (5, 6))
    errors = {}
    for envelope in ("matched", "gaussian"):
        spectrum = GaussianSpectrum(num_heads=1, head_dim=8, num_frequencies=100_000, lengthscale=0.5).double()
        coefficient = {"norm_coefficient": 0.5} if envelope == "gaussian" else {}
        kernel = Kernel("prf", spectrum, envelope=envelope, **coefficient)
        kernel.input_scale = 1.0
        errors[envelope] = relative_error(kernel.estimate(q, k), exact.softmax_kernel(2 * q, 2 * k))
    assert errors["matched"] < 0.05
    assert errors["gaussian"] > 0.2


def test_learned_weights_start_equal_and_change_the_kernel():
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "num_frequencies": 12, "num_components": 2, "tied": False}
    spectrum = GaussianMixtureSpectrum(**sizes, weights="learned")
    assert torch.equal(spectrum.log_weights(), torch.zeros(HEADS, 12))
    with torch.no_grad():
        spectrum.logits[:, 0] += math.log(3)
    weights = spectrum.log_weights().exp()
    torch.testing.assert_close(weights[0], torch.tensor([1.5] * 6 + [0.5] * 6))


def test_a_learned_smoothing_starts_where_it_is_told_and_stays_positive():
    mechanism = build("gmm-rks", smoothing=0.2, learn_smoothing=True)
    torch.testing.assert_close(mechanism.kernel.present().smoothing, torch.full((HEADS,), 0.2, dtype=torch.float64))
    with torch.no_grad():
        mechanism.kernel.log_smoothing -= 50
    least = torch.full((HEADS,), LEAST_SMOOTHING, dtype=torch.float64)
    torch.testing.assert_close(mechanism.kernel.present().smoothing, least)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_learned_smoothing_that_went_below_its_bound_comes_back(causal):
    mechanism = build("gmm-rks", dtype=torch.float32, smoothing=0.2, learn_smoothing=True, num_frequencies=4)
    log_smoothing = mechanism.kernel.log_smoothing
    x = operands(dtype=torch.float32, causal=causal, queries=200, std=4.0).require_grad()
    with torch.no_grad():
        log_smoothing.fill_(-110)  # exp(-110) is 0 in float32
    out = mechanism(*x, causal=causal)
    out.square().sum().backward()
    assert all(t.isfinite().all() for t in (out, *(t.grad for t in (*x, log_smoothing))))
    # Results are bounded by how often a sum of weights of one is as large as the least mean.
    assert out.abs().max() < x.v.abs().max() * 4 / LEAST_SMOOTHING
    # Less smoothing makes results larger: a step down the gradient raises it.
    assert (log_smoothing.grad < 0).all()


@pytest.mark.parametrize("name", [name for name in NAMES if "redraw" in klformer.attention_options(name)])
def test_one_draw_is_kept_for_good(name):
    mechanism, x = build(name, redraw=False), operands()
    expected = mechanism(*x)
    klformer.resample(mechanism, torch.Generator().manual_seed(1))
    mechanism.kernel.spectrum.resample(torch.Generator().manual_seed(1))
    assert torch.equal(mechanism(*x), expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("generative-prf", {"envelope": "matched"}, "envelope='matched' needs frequencies that are one linear map"),
        ("gmm-prf", {"envelope": "matched", "tied": False}, "share their scale"),
        ("gmm-prf", {"envelope": "round"}, "envelope must be one of 'gaussian', 'matched', 'simplex', got 'round'"),
        ("gmm-rks", {"weights": "learned"}, "pass tied=False"),
        ("gmm-rks", {"smoothing": 0.0, "learn_smoothing": True}, "smoothing of at least 0.0001 to start from, got 0.0"),
        ("gmm-prf", {"envelope": "simplex", "norm_coefficient": 0.5}, "norm_coefficient must be 1 for envelope="),
        ("performer", {"envelope": "matched", "norm_coefficient": 0.0}, "norm_coefficient must be 1 for .*, got 0.0"),
        ("gmm-rks", {"coupling": "none"}, "coupling must be one of 'iid', 'orthogonal', 'antithetic'"),
        ("fastfood-rks", {"coupling": "orthogonal"}, "can't be Gaussian and orthogonal at once"),
        ("atoms-prf", {"start": "atoms"}, "start must be one of 'pairs', 'orthogonal', 'gaussian', 'gmm'"),
        ("atoms-prf", {"lengthscale": 0.0}, "lengthscale must be finite and above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"envelope": "simplex"}, "envelope must be 'gaussian' for 'rks', which has none, got 'simplex'"),
        ({"norm_coefficient": 0.5}, "norm_coefficient must be 1 for 'rks', which has no c, got 0.5"),
    ],
)
def test_a_kernel_of_cosines_has_no_envelope(options, message):
    with pytest.raises(ValueError, match=message):
        Kernel("rks", GaussianSpectrum(num_heads=1, head_dim=4), **options)


def test_learned_weights_of_a_tied_mixture_are_positive_features_only():
    mechanism, x = build("gmm-prf", weights="learned"), operands()
    equal = mechanism(*x)
    with torch.no_grad():
        mechanism.kernel.spectrum.logits[:, 0] += 1.0
    assert not torch.allclose(mechanism(*x), equal)


def test_atoms_start_from_a_draw_of_the_gaussian():
    omega = build("atoms-rks", start="gaussian", lengthscale=2.0, num_frequencies=2000).kernel.spectrum.frequencies()
    assert omega.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("gmm-prf", {"weights": "learned", "coupling": "orthogonal"}, "weights='learned', coupling='orthogonal'"),
        ("gmm-rks", {"learn_smoothing": True, "redraw": False}, "smoothing=0.1, learn_smoothing=True, redraw=False"),
        ("gmm-rks", {"learn_smoothing": True, "frozen": True}, "learn_smoothing=True, frozen=True"),
        ("fastfood-prf", {"coupling": "antithetic"}, "coupling='antithetic'"),
        ("fastfood-prf", {"learn_temperature": True}, "norm_coefficient=1, learn_temperature=True"),
        ("generative-rks", {"coupling": "orthogonal"}, "coupling='orthogonal'"),
        ("performer", {}, "envelope='gaussian', norm_coefficient=0.5"),
        ("rbf-rks", {"lengthscale": 2.5}, "coupling='iid', lengthscale=2.5"),
    ],
)
def test_options_are_shown(name, options, shown):
    assert shown in repr(build(name, **options).kernel)


@pytest.mark.parametrize("learn", ["none", "s", "sgb"])
def test_the_anchor_tells_the_precision(learn):
    for dtype in (torch.float16, torch.float64):
        spectrum = FastFoodSpectrum(num_heads=1, head_dim=4, learn=learn).to(dtype)
        assert spectrum.anchor().dtype == dtype


def spectra(coupling):
    """Distributions whose noise has a coupling, away from their start, of one head."""
    sizes = {"num_heads": 1, "head_dim": 8, "num_frequencies": 16, "coupling": coupling}
    made = {
        "gaussian": GaussianSpectrum(**sizes),
        "gmm": GaussianMixtureSpectrum(**sizes, num_components=1, tied=False, init="identity"),
        "tied gmm": GaussianMixtureSpectrum(**sizes),
        "generative": GenerativeSpectrum(**sizes, hidden_dims=()),
    }
    if coupling != "orthogonal":
        made["fastfood"] = FastFoodSpectrum(**sizes, learn="none")
    return {name: spectrum.double() for name, spectrum in made.items()}


def estimates(spectrum, feature_map, draws=3000):
    """(draws, L, S) estimates of the kernel at some points."""
    kernel = Kernel(feature_map, spectrum)
    generator = torch.Generator().manual_seed(11)
    q, k = (0.25 * torch.randn(1, 1, 4, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    found = []
    with torch.no_grad():
        for _ in range(draws):
            spectrum.resample(generator)
            found.append(spectrum.frequencies()[0].clone())
        omega = torch.stack(found)
        spectrum.frequencies = lambda: omega  # all draws at once, as if they were heads
        return kernel.estimate(q.expand(1, draws, 4, 8), k.expand(1, draws, 4, 8))[0]


@pytest.mark.parametrize(
    ("coupling", "feature_map"), [("orthogonal", "rks"), ("orthogonal", "prf"), ("antithetic", "prf")]
)
def test_couplings_are_unbiased_and_lower_the_variance(coupling, feature_map):
    torch.manual_seed(5)
    independent = spectra("iid")
    coupled = spectra(coupling)
    for name, spectrum in coupled.items():
        spectrum.load_state_dict({**spectrum.state_dict(), **dict(independent[name].named_parameters())})
        iid, other = estimates(independent[name], feature_map), estimates(spectrum, feature_map)
        error = ((iid.var(0) + other.var(0)) / len(iid)).sqrt()
        assert ((iid.mean(0) - other.mean(0)).abs() < 4 * error).all(), name
        if name == "generative" and coupling == "orthogonal":
            continue  # theory says nothing of a network's outputs
        # Sums over points of the variance, with the standard error of their difference.
        spread = [((x - x.mean(0)) ** 2).sum((1, 2)) for x in (iid, other)]
        difference = spread[0].mean() - spread[1].mean()
        error = (spread[0].var() + spread[1].var()).div(len(iid)).sqrt()
        if name == "tied gmm" and (coupling, feature_map) == ("orthogonal", "prf"):
            assert difference > -4 * error, name  # a few percent: too little to be seen here
        else:
            assert difference > 4 * error, name


def test_antithetic_frequencies_double_the_variance_of_cosines():
    """A cosine is even: half of the frequencies, which are independent, say all that there is in a draw."""
    distance = torch.randn(7, 8, dtype=torch.float64)
    for name in ("gaussian", "tied gmm", "fastfood"):
        cosines = (distance @ spectra("antithetic")[name].frequencies()[0].T).cos()
        torch.testing.assert_close(cosines[:, :8].mean(1), cosines.mean(1), msg=name)
        independent = (distance @ spectra("iid")[name].frequencies()[0].T).cos()
        assert not torch.allclose(independent[:, :8].mean(1), independent.mean(1)), name


@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "antithetic"])
def test_each_noise_vector_is_gaussian(coupling):
    noise, generator = torch.empty(13, 4), torch.Generator().manual_seed(2)
    draws = []
    for _ in range(4000):
        draw_noise(noise, generator, coupling)
        draws.append(noise.clone())
    stacked = torch.stack(draws)
    assert (stacked.mean(0).abs() < 5 / 4000**0.5).all()
    assert (stacked.var(0) - 1).abs().max() < 5 * (2 / 4000) ** 0.5
    assert (stacked.pow(4).mean(0) - 3).abs().max() < 5 * (96 / 4000) ** 0.5
    if coupling == "antithetic":
        assert torch.equal(stacked[:, :6], -stacked[:, 7:])


def test_antithetic_fastfood_has_its_frequencies_in_pairs():
    omega = build("fastfood-prf", coupling="antithetic").kernel.spectrum.frequencies()
    half = omega.shape[1] // 2
    assert torch.equal(omega[:, :half], -omega[:, half:])
