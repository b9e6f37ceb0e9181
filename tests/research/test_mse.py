"""Theorem 3 and Lemma S.2: formulas by hand, by simulation, and against the kernels that models use."""

import json
import math
from dataclasses import replace

import pytest
import torch

from klformer.kernels import GaussianMixtureSpectrum, Kernel, exact
from research.mse import lemma
from research.mse import measure as mse
from research.mse.command import MseAnalysis, run

DRAWS = 8_000
GRID = mse.Grid(scales=(0.125, 0.5, 1.0), differences=(0.5, 1.0, 3.0), totals=(0.5, 1.0), num_samples=(3, 11))


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def by_hand():
    """p = (1, 2), o = (3, 2), S^T p = (2, -1), S^T o = (2, 1), mu.p = 0.5, mu.o = 0.7; S is not symmetric."""
    return mse.Problem(
        q=vector(1, 0),
        k=vector(2, 2),
        mean=vector(0.1, 0.2),
        root=torch.tensor([[0.0, 1.0], [1.0, -1.0]], dtype=torch.float64),
        num_samples=5,
    )


@pytest.fixture(scope="module")
def simulated():
    """Every problem of the grid with the simulation of both maps."""
    generator = torch.Generator().manual_seed(11)
    problems = [GRID.problem(point) for point in GRID.points()]
    return [(problem, mse.simulate(problem, draws=DRAWS, generator=generator)) for problem in problems]


def tame(simulated, name):
    return [(problem, results[name]) for problem, results in simulated if mse.is_tame(problem, name)]


def test_what_the_formulas_are_made_of(by_hand):
    assert by_hand.norms == 9
    assert by_hand.difference_phase == pytest.approx(0.5)
    assert by_hand.total_phase == pytest.approx(0.7)
    # S^T p = (0 * 1 + 1 * 2, 1 * 1 - 1 * 2) and S^T o = (0 * 3 + 1 * 2, 1 * 3 - 1 * 2)
    assert by_hand.difference_spread == pytest.approx(5)
    assert by_hand.total_spread == pytest.approx(5)
    # S S^T = [[1, -1], [-1, 2]]
    assert by_hand.largest_eigenvalue == pytest.approx((3 + math.sqrt(5)) / 2)


def test_formulas_by_hand(by_hand):
    e = math.exp
    assert mse.rks_kernel(by_hand) == pytest.approx(e(-2.5) * math.cos(0.5))
    assert mse.prf_kernel(by_hand) == pytest.approx(e(2.5 + 0.7 - 9))
    assert mse.rks_mse_printed(by_hand) == pytest.approx(0.4 * math.cos(0.5) ** 2 * (1 - e(-5)) ** 2)
    assert mse.rks_mse(by_hand) == pytest.approx(0.1 * math.cos(0.5) ** 2 * (1 - e(-5)) ** 2)
    root = math.sqrt(5)
    assert mse.prf_mse_printed(by_hand) == pytest.approx(0.2 * e(-2 * (9 - 0.7)) * (e(2 * root) - e(root)))
    assert mse.prf_mse(by_hand) == pytest.approx(0.2 * e(-2 * (9 - 0.7)) * (e(10) - e(5)))
    assert mse.prf_mse(by_hand, tied=True) == pytest.approx(0.2 * e(-18) * math.cosh(0.7) ** 2 * (e(10) - e(5)))
    assert mse.rks_bound_printed(5) == pytest.approx(0.4)
    assert mse.rks_bound(5) == pytest.approx(0.1)


def test_nothing_is_random_without_a_covariance(by_hand):
    still = replace(by_hand, root=torch.zeros(2, 2, dtype=torch.float64))
    results = mse.simulate(still, draws=3, generator=torch.Generator().manual_seed(0))
    for name, result in results.items():
        assert mse.CORRECTED[name](still) == mse.PRINTED[name](still) == 0
        assert result.mse == pytest.approx(0, abs=1e-30)


def test_closed_forms_are_those_of_the_library(by_hand):
    q, k = by_hand.q[None], by_hand.k[None]
    covariance = (by_hand.root @ by_hand.root.T)[None]
    pair = torch.stack([by_hand.mean, -by_hand.mean])
    assert mse.rks_kernel(by_hand) == pytest.approx(exact.gmm_rks_kernel(q, k, pair, covariance.expand(2, 2, 2)).item())
    assert mse.prf_kernel(by_hand) == pytest.approx(exact.gmm_prf_kernel(q, k, by_hand.mean[None], covariance).item())


@pytest.mark.parametrize("name", ["rks", "prf"])
def test_estimates_are_unbiased(simulated, name):
    for _, result in tame(simulated, name):
        assert abs(mse.standard_errors(0.0, result.bias, result.bias_error)) < 4


@pytest.mark.parametrize("name", ["rks", "prf"])
def test_corrected_formula_holds(simulated, name):
    cases = tame(simulated, name)
    assert len(cases) == len(GRID)
    for problem, result in cases:
        assert abs(mse.standard_errors(mse.CORRECTED[name](problem), result.mse, result.mse_error)) < 4


@pytest.mark.parametrize("name", ["rks", "prf"])
def test_printed_formula_fails(simulated, name):
    off = [
        abs(mse.standard_errors(mse.PRINTED[name](problem), result.mse, result.mse_error))
        for problem, result in tame(simulated, name)
    ]
    assert max(off) > 10
    if name == "rks":
        assert min(off) > 10


def test_printed_rks_is_for_a_kernel_of_two_at_distance_zero():
    problem = GRID.problem(mse.Point(0.5, 1.0, 1.0, 7))
    noise = torch.randn(30_000, 7, GRID.dim, dtype=torch.float64)
    errors = (2 * mse.estimates(problem, "rks", noise) - 2 * mse.rks_kernel(problem)).square()
    error = errors.std().item() / len(errors) ** 0.5
    assert abs(mse.standard_errors(mse.rks_mse_printed(problem), errors.mean().item(), error)) < 4


def test_outer_square_of_the_statement_is_right_and_that_of_the_proof_is_not():
    problem = GRID.problem(mse.Point(0.5, 1.0, 1.0, 7))
    result = mse.simulate(problem, draws=30_000, generator=torch.Generator().manual_seed(2))["rks"]
    spread = problem.difference_spread
    proof = math.cos(problem.difference_phase) ** 2 * (1 - math.exp(-spread) ** 2) / (2 * problem.num_samples)
    assert abs(mse.standard_errors(proof, result.mse, result.mse_error)) > 10


def test_covariance_is_s_s_transposed():
    problem = GRID.problem(mse.Point(0.5, 1.0, 1.0, 7))
    results = mse.simulate(problem, draws=30_000, generator=torch.Generator().manual_seed(3))
    transposed = replace(problem, root=problem.root.T.contiguous())
    for name, result in results.items():
        assert abs(mse.standard_errors(mse.CORRECTED[name](problem), result.mse, result.mse_error)) < 4
        assert abs(mse.standard_errors(mse.CORRECTED[name](transposed), result.mse, result.mse_error)) > 10


def test_standard_error_is_that_of_independent_repetitions():
    problem = GRID.problem(mse.Point(0.5, 1.0, 1.0, 3))
    generator = torch.Generator().manual_seed(4)
    batches = [mse.simulate(problem, draws=1_000, generator=generator) for _ in range(300)]
    for name in mse.KERNELS:
        values = torch.tensor([batch[name].mse for batch in batches])
        errors = torch.tensor([batch[name].mse_error for batch in batches])
        # The spread of 300 values is known to 1/sqrt(600) = 4%, and the fourth moment is an estimate too.
        assert values.std().item() == pytest.approx(errors.mean().item(), rel=0.2)


def test_chunks_do_not_change_the_result(monkeypatch):
    problem = GRID.problem(mse.Point(0.5, 1.0, 1.0, 3))
    whole = mse.simulate(problem, draws=1_000, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(mse, "CHUNK", 16 * 3 * GRID.dim)
    parts = mse.simulate(problem, draws=1_000, generator=torch.Generator().manual_seed(5))
    for name in mse.KERNELS:
        assert parts[name].mse == pytest.approx(whole[name].mse, rel=1e-10)
        assert parts[name].mse_error == pytest.approx(whole[name].mse_error, rel=1e-10)


def test_bounds_of_rks(simulated):
    for problem, results in simulated:
        tight = mse.rks_bound(problem.num_samples)
        assert mse.rks_mse(problem) <= tight < mse.rks_bound_printed(problem.num_samples)
        assert results["rks"].mse < tight + 4 * results["rks"].mse_error
    far = replace(GRID.problem(mse.Point(1.0, 60.0, 1.0, 7)), mean=torch.zeros(GRID.dim, dtype=torch.float64))
    assert mse.rks_mse(far) == pytest.approx(mse.rks_bound(7))


def test_prf_has_no_bound_from_the_eigenvalue_one_half_on():
    mean = vector(0.3, 0.1)
    for eigenvalue, bounded in ((0.2, True), (0.45, True), (0.6, False), (1.0, False)):
        root = math.sqrt(eigenvalue) * torch.eye(2, dtype=torch.float64)
        x = torch.randn(200, 2, dtype=torch.float64)
        x = x / x.norm(dim=-1, keepdim=True) * torch.linspace(0, 12, 200, dtype=torch.float64)[:, None]
        problems = [mse.Problem(q=q, k=q, mean=mean, root=root, num_samples=5) for q in x]
        bound, largest = mse.prf_bound(problems[0]), max(map(mse.prf_mse, problems))
        assert (largest < 1e3) == bounded == math.isfinite(bound)
        assert largest <= bound


def test_error_of_prf_exceeds_the_bound_of_rks_in_simulation():
    problem = mse.Grid().problem(mse.Point(2.0, 0.25, 0.5, 16))
    result = mse.simulate(problem, draws=20_000, generator=torch.Generator().manual_seed(6))["prf"]
    assert result.mse - 4 * result.mse_error > mse.rks_bound_printed(16)


def test_errors_fall_with_the_eigenvalues():
    generator = torch.Generator().manual_seed(7)
    problems = [GRID.problem(mse.Point(scale, 1.0, 1.0, 7)) for scale in (0.05, 0.1, 0.3, 0.9)]
    results = [mse.simulate(problem, draws=5_000, generator=generator) for problem in problems]
    for name in mse.KERNELS:
        errors = [result[name].mse for result in results]
        assert errors == sorted(errors)
        # Near 0 as the square of the eigenvalues for RKS and in proportion to them for PRF.
        power = math.log(errors[1] / errors[0]) / math.log(4)
        assert power == pytest.approx({"rks": 2, "prf": 1}[name], abs=0.1)


def test_relative_errors_fall_too_and_have_no_bound():
    for point in GRID.points():
        problem = GRID.problem(point)
        rks = mse.rks_mse(problem) / mse.rks_kernel(problem) ** 2
        prf = mse.prf_mse(problem) / mse.prf_kernel(problem) ** 2
        assert rks == pytest.approx(2 / point.num_samples * math.sinh(problem.difference_spread / 2) ** 2)
        assert prf == pytest.approx(math.expm1(problem.total_spread) / point.num_samples)


@pytest.mark.parametrize(
    ("name", "tied", "formula", "closed_form"),
    [
        ("rks", True, mse.rks_mse, exact.gmm_rks_kernel),
        ("prf", False, mse.prf_mse, exact.gmm_prf_kernel),
        ("prf", True, lambda problem: mse.prf_mse(problem, tied=True), exact.gmm_prf_kernel),
    ],
)
def test_theorem_holds_for_the_kernels_of_the_library(name, tied, formula, closed_form):
    dim, samples = 5, 7
    components = 2 if tied else 1
    generator = torch.Generator().manual_seed(8)
    spectrum = GaussianMixtureSpectrum(
        num_heads=1, head_dim=dim, num_frequencies=components * samples, num_components=components, tied=tied
    ).double()
    kernel = Kernel(name, spectrum)
    with torch.no_grad():
        spectrum.mean.copy_(0.4 * torch.randn(dim, generator=generator))
        spectrum.scale.copy_(0.4 * torch.randn(dim, dim, generator=generator))
        q, k = torch.randn(2, dim, generator=generator, dtype=torch.float64)
        estimates = []
        for _ in range(3_000):
            kernel.spectrum.resample(generator)
            estimates.append(kernel.estimate(q[None, None, None], k[None, None, None])[0, 0, 0, 0])
        mean, root = spectrum.mean[0, 0], spectrum.scale[0, 0]
        scaled_q, scaled_k = q * kernel.input_scale, k * kernel.input_scale
        means = torch.stack([mean, -mean][:components])
        covariances = spectrum.covariance()[0].expand(components, dim, dim)
        truth = closed_form(scaled_q[None], scaled_k[None], means, covariances).item()
    estimates = torch.stack(estimates)
    bias_error = estimates.std().item() / len(estimates) ** 0.5
    assert abs(mse.standard_errors(truth, estimates.mean().item(), bias_error)) < 4
    problem = mse.Problem(q=scaled_q, k=scaled_k, mean=mean, root=root, num_samples=samples)
    errors = (estimates - truth).square()
    error = errors.std().item() / len(errors) ** 0.5
    assert error < 0.1 * formula(problem)
    assert abs(mse.standard_errors(formula(problem), errors.mean().item(), error)) < 4
    if (name, tied) != ("prf", True):  # of which the paper says nothing
        assert abs(mse.standard_errors(mse.PRINTED[name](problem), errors.mean().item(), error)) > 10


def test_lemma_s2_by_hand():
    x, y = vector(3, 4) / 10, vector(-6, 8) / 10
    assert lemma.kernel(x, y) == pytest.approx(math.exp(-(0.81 + 0.16) / 2))
    assert lemma.rks_printed(x, y) == pytest.approx(4 * math.exp(-0.485))
    # x + y = (-0.3, 1.2), |x| = 0.5, |y| = 1
    assert lemma.prf_printed(x, y) == pytest.approx(math.exp(1.53 / 2 - 1.5))


@pytest.mark.parametrize("dim", [2, 3, 7])
@pytest.mark.parametrize("difference", [0.5, 0.9])
def test_lemma_s2(dim, difference):
    # Near |x| + |y| = |x|^2 + |y|^2 the printed PRF map would pass.
    point = mse.Grid(dim=dim).problem(mse.Point(1.0, difference, 1.0, 1))
    x, y = point.q, point.k
    averages = lemma.simulate(x, y, draws=100_000, generator=torch.Generator().manual_seed(9))
    kernel = lemma.kernel(x, y)
    expected = {"rks_printed": lemma.rks_printed(x, y), "prf_printed": lemma.prf_printed(x, y)}
    for name, average in averages.items():
        assert abs(mse.standard_errors(expected.get(name, kernel), average.value, average.error)) < 4
        if name in expected:
            assert abs(mse.standard_errors(kernel, average.value, average.error)) > 10


def test_grid_has_the_lengths_that_it_says():
    for point in mse.Grid().points():
        problem = mse.Grid().problem(point)
        assert (problem.q - problem.k).norm().item() == pytest.approx(point.difference)
        assert (problem.q + problem.k).norm().item() == pytest.approx(point.total)
        eigenvalues = torch.linalg.eigvalsh(problem.root @ problem.root.T)
        assert eigenvalues.mean().item() == pytest.approx(point.scale**2)


def test_bad_arguments(by_hand):
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        replace(by_hand, num_samples=0)
    with pytest.raises(ValueError, match=r"k must be float64 of shape \(2,\), got torch.float64 \(3,\)"):
        replace(by_hand, k=vector(1, 2, 3))
    with pytest.raises(ValueError, match=r"mean must be float64 of shape \(2,\), got torch.float32 \(2,\)"):
        replace(by_hand, mean=torch.zeros(2))
    with pytest.raises(ValueError, match="scales must be finite and at least 0, got -1"):
        mse.Grid(scales=(-1.0,))
    with pytest.raises(ValueError, match="draws must be at least 2, got 1"):
        mse.simulate(by_hand, draws=1, generator=torch.Generator())
    with pytest.raises(ValueError, match="draws must be at least 2, got 1"):
        MseAnalysis(draws=1)


def test_command(tmp_path, capsys):
    run(MseAnalysis(draws=300, quick=True, out=tmp_path))
    printed = capsys.readouterr().out
    assert "Theorem 3" in printed
    assert "Lemma S.2: the maps" in printed
    for name in ("mse", "lemma-s2"):
        for ending in ("json", "csv", "svg", "png"):
            assert (tmp_path / f"{name}.{ending}").stat().st_size > 0
    report = json.loads((tmp_path / "mse.json").read_text())
    assert {row["map"] for row in report["rows"]} == {"rks", "prf"}
    assert report["settings"]["draws"] == 300
