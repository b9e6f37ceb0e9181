"""Distributions of frequencies: their shapes, their initial values, and that every estimator is unbiased."""

import pytest
import torch

from klformer.attention import AttentionSpec, MultiheadAttention
from klformer.kernels import (
    SPECTRA,
    FastFoodSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    GenerativeSpectrum,
    Kernel,
    exact,
)

HEADS, DIM, FREQUENCIES = 3, 5, 14


@pytest.fixture
def points():
    """Queries and keys (4, D) and (6, D), so small that means of log-normal PRF estimates are near Gaussian."""
    return 0.25 * torch.randn(4, DIM, dtype=torch.float64), 0.25 * torch.randn(6, DIM, dtype=torch.float64)


def assert_unbiased(spectrum, points, cases, *, draws=1500):
    """The mean estimates over independent draws are the closed forms, within 4 standard errors.

    Args:
        cases: Feature map, norm coefficient and closed form (H or 1, L, S); all are estimated from the same draws.
    """
    kernels = [Kernel(feature_map, spectrum, norm_coefficient=coefficient) for feature_map, coefficient, _ in cases]
    for kernel in kernels:
        kernel.input_scale = 1.0
    generator = torch.Generator().manual_seed(3)
    estimates = [[] for _ in cases]
    with torch.no_grad():
        for _ in range(draws):
            spectrum.resample(generator)
            for kernel, found in zip(kernels, estimates, strict=True):
                found.append(kernel.estimate(*(x.expand(1, HEADS, *x.shape) for x in points))[0])
    for (_, _, expected), found in zip(cases, estimates, strict=True):
        stacked = torch.stack(found)
        error = stacked.std(0) / draws**0.5
        assert ((stacked.mean(0) - expected).abs() < 4 * error + 1e-12).all()
        # The test must be able to fail: a kernel that is off by a tenth is seen.
        assert (error / expected.abs()).median() < 0.025


@pytest.mark.parametrize("coupling", ["iid", "orthogonal"])
def test_gaussian_estimates_the_gaussian_and_softmax_kernels(coupling, points):
    sizes = {"num_heads": HEADS, "head_dim": DIM, "num_frequencies": FREQUENCIES, "coupling": coupling}
    spectrum = GaussianSpectrum(**sizes).double()
    gaussian, softmax = exact.gaussian_kernel(*points), exact.softmax_kernel(*points)
    assert_unbiased(spectrum, points, [("rks", 1.0, gaussian), ("prf", 1.0, gaussian), ("prf", 0.5, softmax)])
    wide = GaussianSpectrum(**sizes, lengthscale=2.0).double()
    assert_unbiased(wide, points, [("rks", 1.0, exact.gaussian_kernel(*points, lengthscale=2.0))])


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize(("tied", "components"), [(True, 2), (False, 1), (False, 2), (False, 7)])
def test_mixture_estimates_its_closed_form(covariance, tied, components, points):
    spectrum = GaussianMixtureSpectrum(
        num_heads=HEADS,
        head_dim=DIM,
        num_frequencies=FREQUENCIES,
        num_components=components,
        covariance=covariance,
        tied=tied,
    ).double()
    with torch.no_grad():
        spectrum.mean.normal_()
        spectrum.scale.normal_(std=0.4)
    mean, matrices = spectrum.mean.detach(), spectrum.covariance().detach()
    if tied:
        mean, matrices = torch.cat([mean, -mean], 1), matrices.expand(-1, 2, -1, -1)
    heads = range(HEADS)
    rks = torch.stack([exact.gmm_rks_kernel(*points, mean[h], matrices[h]) for h in heads])
    prf = torch.stack([exact.gmm_prf_kernel(*points, mean[h], matrices[h]) for h in heads])
    assert_unbiased(spectrum, points, [("rks", 1.0, rks), ("prf", 1.0, prf)])


@pytest.mark.parametrize(
    ("frequencies", "coupling"), [(4, "iid"), (8, "iid"), (21, "iid"), (8, "antithetic"), (21, "antithetic")]
)
def test_structured_fastfood_estimates_the_gaussian_kernel(frequencies, coupling, points):
    spectrum = FastFoodSpectrum(
        num_heads=HEADS, head_dim=DIM, num_frequencies=frequencies, learn="none", lengthscale=1.0, coupling=coupling
    ).double()
    expected = exact.gaussian_kernel(*points)
    assert_unbiased(spectrum, points, [("rks", 1.0, expected), ("prf", 1.0, expected)])


@pytest.mark.parametrize("learn", ["none", "s", "sgb"])
@pytest.mark.parametrize(("dim", "frequencies"), [(8, 8), (8, 24), (5, 13), (1, 3)])
def test_fastfood_is_its_dense_product(learn, dim, frequencies):
    spectrum = FastFoodSpectrum(
        num_heads=2, head_dim=dim, num_frequencies=frequencies, learn=learn, lengthscale=1.5
    ).double()
    size = spectrum.block_dim
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)], 0)
    for head in range(2):
        blocks = []
        for block in range(spectrum.num_blocks):
            scaling, gaussian, signs = (
                torch.diag(t[head, block]) for t in (spectrum.scaling, spectrum.gaussian, spectrum.signs)
            )
            permutation = torch.eye(size, dtype=torch.float64)[spectrum.permutation[head, block]]
            blocks.append(scaling @ hadamard @ gaussian @ permutation @ hadamard @ signs / (1.5 * size**0.5))
        dense = torch.cat(blocks)[:frequencies, :dim]
        torch.testing.assert_close(spectrum.frequencies()[head], dense, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("learn", ["none", "s", "sgb"])
def test_fastfood_learns_what_it_says(learn):
    spectrum = FastFoodSpectrum(num_heads=2, head_dim=8, num_frequencies=8, learn=learn)
    learned = {"none": set(), "s": {"scaling"}, "sgb": {"scaling", "gaussian", "signs"}}[learn]
    assert {name for name, _ in spectrum.named_parameters()} == learned
    before = {name: tensor.clone() for name, tensor in spectrum.state_dict().items()}
    spectrum.resample(torch.Generator().manual_seed(1))
    changed = {name for name, tensor in spectrum.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(before) - learned


@pytest.mark.parametrize("learn", ["none", "s", "sgb"])
def test_a_new_draw_of_fastfood_is_as_wide_as_the_first(learn):
    """S is divided by |G|: where it is learned, |G| must stay."""
    spectrum = FastFoodSpectrum(num_heads=400, head_dim=4, num_frequencies=32, learn=learn, lengthscale=1.0)
    before, generator = spectrum.frequencies(), torch.Generator().manual_seed(1)
    spectrum.resample(generator)
    after = spectrum.frequencies()
    assert not torch.equal(before, after)
    for omega in (before, after):
        squares = omega.square().sum(-1).flatten()
        assert (squares.mean() - 4).abs() < 4 * squares.std() / len(squares) ** 0.5


@pytest.mark.parametrize("spectrum_name", SPECTRA)
def test_frequencies_and_their_pairs_agree(spectrum_name):
    spectrum = SPECTRA[spectrum_name](num_heads=HEADS, head_dim=DIM, num_frequencies=FREQUENCIES)
    omega = spectrum.frequencies()
    assert omega.shape[0] in (1, HEADS)
    assert omega.shape[1:] == (FREQUENCIES, DIM)
    assert (spectrum.paired_frequencies() is not None) == (spectrum_name == "gmm")
    if (pairs := spectrum.paired_frequencies()) is not None:
        half, offset = pairs[0], pairs[1].unsqueeze(-2)
        torch.testing.assert_close(torch.cat([half + offset, half - offset], dim=-2), omega)


def test_orthogonal_frequencies_are_orthogonal_in_blocks():
    spectrum = GaussianSpectrum(num_heads=1, head_dim=8, num_frequencies=20, coupling="orthogonal").double()
    gram = spectrum.omega[0] @ spectrum.omega[0].T
    for start in (0, 8, 16):
        block = gram[start : start + 8, start : start + 8]
        assert (block - torch.diag(block.diagonal())).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "options", "norm"),
    [
        ("fastfood-rks", {}, 7.97 / 64**0.25),
        ("fastfood-prf", {}, 7.97 / 64**0.25),
        ("fastfood-prf", {"lengthscale": 1.0}, 7.97),
        ("fastfood-prf", {"init": "released"}, 0.0125),
    ],
)
def test_where_fastfood_starts(name, options, norm):
    torch.manual_seed(0)
    spec = AttentionSpec(name=name, options={"num_frequencies": 4096, **options})
    attention = MultiheadAttention(model_dim=256, num_heads=4, attention=spec)
    frequencies = attention.mechanism.kernel.spectrum.frequencies()
    assert frequencies.norm(dim=-1).mean().item() == pytest.approx(norm, rel=0.1)


def test_initial_frequencies_are_those_of_the_notes():
    sizes = {"num_heads": 4, "head_dim": 64, "num_frequencies": 4096}
    released = GaussianMixtureSpectrum(**sizes).frequencies().norm(dim=-1).mean().item()
    assert released == pytest.approx(1.37, rel=0.03)
    assert FastFoodSpectrum(**sizes, init="released").frequencies().norm(dim=-1).mean().item() == pytest.approx(
        0.0125, rel=0.1
    )
    structured = FastFoodSpectrum(**sizes, lengthscale=1.0).frequencies().norm(dim=-1).mean().item()
    assert structured == pytest.approx(7.97, rel=0.02)
    diagonal = GaussianMixtureSpectrum(**sizes, covariance="diagonal").covariance().diagonal(dim1=-2, dim2=-1)
    assert diagonal.mean().item() == pytest.approx(1.0, abs=0.1)
    identity = GaussianMixtureSpectrum(**sizes, init="identity").covariance()
    assert torch.equal(identity, torch.eye(64).expand_as(identity))


def test_the_generator_is_that_of_the_paper():
    """Four hidden layers with batch norm over the sample and LeakyReLU, one linear layer, tanh."""
    spectrum = GenerativeSpectrum(num_heads=2, head_dim=4, num_frequencies=50, noise_dim=3, hidden_dims=(5, 6, 7, 8))
    kinds = [type(layer).__name__ for layer in spectrum.generator]
    assert kinds == ["Linear", "BatchNorm1d", "LeakyReLU"] * 4 + ["Linear", "Tanh"]
    hidden = spectrum.generator[:2](spectrum.noise)
    torch.testing.assert_close(hidden.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(hidden.var(0, unbiased=False), torch.ones(5), atol=1e-3, rtol=0)
    assert spectrum.frequencies().shape == (1, 50, 4)
    assert spectrum.frequencies().abs().max() < 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GaussianMixtureSpectrum(num_heads=1, head_dim=4, num_frequencies=9),
            "multiple of num_components=2, got 9",
        ),
        (lambda: GaussianMixtureSpectrum(num_heads=1, head_dim=4, num_components=3), "tied needs num_components=2"),
        (lambda: GaussianMixtureSpectrum(num_heads=1, head_dim=4, covariance="diag"), "covariance must be one of"),
        (lambda: GaussianMixtureSpectrum(num_heads=1, head_dim=4, init="zero"), "init must be one of"),
        (
            lambda: FastFoodSpectrum(num_heads=1, head_dim=4, learn="all"),
            "learn must be one of 'none', 's', 'sgb', got 'all'",
        ),
        (
            lambda: FastFoodSpectrum(num_heads=1, head_dim=4, lengthscale=0.0),
            "lengthscale must be finite and above 0, got 0.0",
        ),
        (lambda: GaussianSpectrum(num_heads=1, head_dim=4, coupling="none"), "coupling must be one of"),
        (
            lambda: GenerativeSpectrum(num_heads=1, head_dim=4, num_frequencies=1),
            "num_frequencies must be at least 2, got 1",
        ),
        (
            lambda: GenerativeSpectrum(num_heads=1, head_dim=4, hidden_dims=(4, 0)),
            "hidden_dims must be at least 1, got 0",
        ),
        (
            lambda: GenerativeSpectrum(num_heads=1, head_dim=4, hidden_dims=(4, 10**30)),
            "hidden_dims must be at most 2,147,483,647",
        ),
        (lambda: GaussianSpectrum(num_heads=1, head_dim=0), "head_dim must be at least 1, got 0"),
        (lambda: Kernel("rks", None), "does not go with"),
        (lambda: Kernel("prf", GaussianSpectrum(num_heads=1, head_dim=4), norm_coefficient=-1.0), "norm_coefficient"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
