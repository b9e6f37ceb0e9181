"""What trained projections can absorb of a kernel, and what they can't (research/pages/identifiability.md)."""

import copy
from itertools import permutations, product

import pytest
import torch

import klformer

HEADS, DIM, LENGTH = 2, 5, 7


def build(name, **options):
    sizes = {"num_heads": HEADS, "head_dim": DIM, "num_frequencies": 12}
    return klformer.build_attention(name, **sizes, **options).double()


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, HEADS, LENGTH, DIM, dtype=torch.float64, generator=generator) for _ in range(3)]


def largest_difference(first, second):
    return (first - second).abs().max().item()


def with_unit_scale(mechanism):
    """The same attention with S = I, and S^T (H, D, D), which projections would have to apply to queries and keys."""
    plain = copy.deepcopy(mechanism)
    scale = mechanism.kernel.spectrum.scale.detach().squeeze(1)
    with torch.no_grad():
        plain.kernel.spectrum.scale.copy_(torch.eye(DIM).expand_as(plain.kernel.spectrum.scale))
    return plain, scale


@pytest.mark.parametrize("causal", [False, True])
def test_the_covariance_of_a_mixture_is_absorbed_by_the_projections(causal):
    """omega = S n gives omega.x = n.(S^T x): attention with (S, q, k) is that with (I, S^T q, S^T k), mean S^-1 mu."""
    mechanism = build("gmm-rks")
    spectrum = mechanism.kernel.spectrum
    with torch.no_grad():
        spectrum.scale.copy_(torch.eye(DIM) + 0.3 * torch.randn_like(spectrum.scale))
    plain, scale = with_unit_scale(mechanism)
    with torch.no_grad():
        plain.kernel.spectrum.mean.copy_(torch.linalg.solve(scale, spectrum.mean.transpose(-1, -2)).transpose(-1, -2))
    q, k, v = inputs()
    absorbed = plain(q @ scale, k @ scale, v, causal=causal)
    assert largest_difference(mechanism(q, k, v, causal=causal), absorbed) < 1e-12
    assert largest_difference(mechanism(q, k, v, causal=causal), plain(q, k, v, causal=causal)) > 1e-3


def test_a_temperature_is_absorbed_as_well():
    mechanism = build("fastfood-rks", learn_temperature=True)
    plain = build("fastfood-rks")
    plain.load_state_dict(mechanism.state_dict(), strict=False)
    with torch.no_grad():
        mechanism.kernel.log_temperature.copy_(torch.tensor([0.3, -0.4]))
    factor = mechanism.kernel.log_temperature.detach().exp()[:, None, None]
    q, k, v = inputs()
    assert largest_difference(mechanism(q, k, v), plain(q * factor, k * factor, v)) < 1e-12


def test_the_papers_envelope_is_not_absorbed_and_the_matched_one_is():
    """exp(-c |x|^2) does not go with S: positive features of a learned covariance are another kernel."""
    errors = {}
    for envelope in ("gaussian", "matched"):
        mechanism = build("gmm-prf", envelope=envelope, covariance="full")
        with torch.no_grad():
            scale = torch.eye(DIM, dtype=torch.float64) + 0.3 * torch.randn_like(mechanism.kernel.spectrum.scale)
            mechanism.kernel.spectrum.scale.copy_(scale)
            mechanism.kernel.spectrum.mean.zero_()
        plain, scale = with_unit_scale(mechanism)
        q, k, v = inputs()
        errors[envelope] = largest_difference(mechanism(q, k, v), plain(q @ scale, k @ scale, v))
    assert errors["matched"] < 1e-12
    assert errors["gaussian"] > 1e-3


def linear_fit_error(target, features):
    """How far kernel values are, up to a factor, from the best that one linear map of queries and keys can make of a
    fixed kernel: relative, by descent over the map."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 30, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    wanted = target(q, k)
    best = float("inf")
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        linear = torch.randn(3, 3, dtype=torch.float64, generator=generator).requires_grad_()
        optimiser = torch.optim.LBFGS([linear], max_iter=200, line_search_fn="strong_wolfe")

        def loss(linear=linear, optimiser=optimiser):
            optimiser.zero_grad()
            made = features(q @ linear, k @ linear)
            factor = (made * wanted).sum() / made.square().sum()  # which cancels in attention
            error = (factor * made - wanted).square().sum() / wanted.square().sum()
            error.backward()
            return error

        optimiser.step(loss)
        best = min(best, loss().item() ** 0.5)
    return best


def gaussian(q, k):
    return (-(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) / 2).exp()


def test_a_mean_is_not_absorbed():
    """A modulation, cos(mu.d), makes a kernel negative somewhere: no linear map makes that of a Gaussian."""
    mu = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)

    def modulated(q, k):
        return gaussian(q, k) * ((q.unsqueeze(-2) - k.unsqueeze(-3)) @ mu).cos()

    def narrowed(q, k):
        return gaussian(2 * q, 2 * k)

    assert linear_fit_error(narrowed, gaussian) < 1e-3
    assert linear_fit_error(modulated, gaussian) > 0.1


def test_a_mixture_of_widths_is_not_absorbed():
    def mixed(q, k):
        return (gaussian(3 * q, 3 * k) + gaussian(q / 2, k / 2)) / 2

    assert linear_fit_error(mixed, gaussian) > 0.1


def rest_of_linear_map(before, after):
    """How far frequencies (R, D) are from the best linear map of others, relative; in any order and with any signs, of
    which cosines know nothing."""
    basis = torch.linalg.qr(before).Q
    rests = []
    for order in permutations(range(len(after))):
        for signs in product((1.0, -1.0), repeat=len(after)):
            other = after[list(order)] * torch.tensor(signs, dtype=after.dtype).unsqueeze(-1)
            rests.append((other - basis @ (basis.T @ other)).norm() / other.norm())
    return min(rests).item()


@pytest.mark.parametrize(
    ("name", "options", "absorbed"),
    [
        ("gmm-rks", {"tied": False, "num_components": 1}, True),
        ("generative-rks", {}, False),
        ("atoms-rks", {}, False),
        ("fastfood-rks", {}, False),
    ],
)
def test_the_shape_of_a_distribution_is_not_absorbed(name, options, absorbed):
    """What training does to the frequencies of a generator, atoms or FastFood is no linear map of them: cosines of
    different frequencies are linearly independent, so that no map of queries and keys makes the same kernel."""
    sizes = {"num_heads": 1, "head_dim": 3, "num_frequencies": 4}
    spectrum = klformer.build_attention(name, **sizes, **options).double().kernel.spectrum
    with torch.no_grad():
        if absorbed:
            spectrum.mean.zero_()
        before = spectrum.frequencies()[0].clone()
        for key, parameter in spectrum.named_parameters():
            if key != "mean":
                parameter += 0.5 * torch.randn_like(parameter)
        rest = rest_of_linear_map(before, spectrum.frequencies()[0])
    assert rest < 1e-12 if absorbed else rest > 0.01


def test_the_smoothing_is_not_absorbed():
    assert linear_fit_error(lambda q, k: gaussian(q, k) + 1.0, lambda q, k: gaussian(q, k) + 0.1) > 0.1
