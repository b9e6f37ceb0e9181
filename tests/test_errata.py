"""Where the paper's formulas are wrong: the printed form fails, the corrected one holds (research/pages/paper.md)."""

import math

import pytest
import torch

from klformer.kernels import FastFoodSpectrum, exact

DIM, SAMPLES, REPEATS = 3, 16, 40_000


@pytest.fixture
def setting():
    """S, mu, q and k, small enough that every moment of the PRF estimate is tame."""
    generator = torch.Generator().manual_seed(5)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return 0.35 * normal(DIM, DIM), 0.5 * normal(DIM), 0.6 * normal(DIM), 0.6 * normal(DIM)


def squared_errors(estimates, truth):
    """Mean squared error and its standard error."""
    errors = (estimates - truth).square()
    return errors.mean().item(), (errors.std() / len(errors) ** 0.5).item()


def tied_frequencies(scale, mean):
    """Noise of REPEATS estimates with SAMPLES draws: (S n + mu, S n - mu)."""
    noise = torch.randn(REPEATS, SAMPLES, DIM, dtype=torch.float64)
    centred = noise @ scale.T
    return centred + mean, centred - mean


def test_theorem_3_rks(setting):
    scale, mean, q, k = setting
    p = k - q
    # omega = S n has the covariance S S^T, so that its projection on p has the variance |S^T p|^2.
    spread = (scale.T @ p).square().sum().item()
    truth = math.exp(-spread / 2) * math.cos(mean @ p)
    plus, minus = tied_frequencies(scale, mean)
    estimates = ((plus @ p).cos() + (minus @ p).cos()).sum(-1) / (2 * SAMPLES)
    measured, error = squared_errors(estimates, truth)
    printed = 2 / SAMPLES * math.cos(mean @ p) ** 2 * (1 - math.exp(-spread)) ** 2
    corrected = printed / 4
    assert abs(measured - corrected) < 4 * error
    assert abs(measured - printed) > 20 * error


def test_theorem_3_prf(setting):
    scale, mean, q, k = setting
    o = q + k
    spread = (scale.T @ o).square().sum().item()
    noise = torch.randn(REPEATS, SAMPLES, DIM, dtype=torch.float64)
    norms = (q.square().sum() + k.square().sum()).item()
    estimates = ((noise @ scale.T + mean) @ o - norms).exp().mean(-1)
    truth = math.exp(mean @ o + spread / 2 - norms)
    measured, error = squared_errors(estimates, truth)
    corrected = math.exp(-2 * (norms - mean @ o)) / SAMPLES * (math.exp(2 * spread) - math.exp(spread))
    lengths = q.norm().item() ** 2 + k.norm().item() ** 2
    printed = (
        math.exp(-2 * (lengths - mean @ o)) / SAMPLES * (math.exp(2 * math.sqrt(spread)) - math.exp(math.sqrt(spread)))
    )
    assert abs(measured - corrected) < 4 * error
    assert abs(measured - printed) > 20 * error


def test_sigma_of_equation_5_is_a_square_root_of_the_covariance(setting):
    scale, _, q, k = setting
    omega = torch.randn(200_000, DIM, dtype=torch.float64) @ scale.T
    cosines = (omega @ (q - k)).cos()
    error = cosines.std().item() / len(cosines) ** 0.5
    zero = torch.zeros(1, DIM, dtype=torch.float64)
    as_root = exact.gmm_rks_kernel(q[None], k[None], zero, (scale @ scale.T)[None]).item()
    symmetric = (scale + scale.T) / 2
    as_covariance = exact.gmm_rks_kernel(q[None], k[None], zero, symmetric[None]).item()
    assert abs(cosines.mean().item() - as_root) < 4 * error
    assert abs(cosines.mean().item() - as_covariance) > 20 * error


def test_fastfood_stacks_whole_blocks():
    # "M | d_q" can't be meant: M = 3 d_q works, and any other M by padding and truncation.
    for frequencies in (24, 8, 5, 13):
        assert FastFoodSpectrum(num_heads=1, head_dim=8, num_frequencies=frequencies).frequencies().shape == (
            1,
            frequencies,
            8,
        )


def test_lemma_s2_rks_needs_no_factor_of_two_to_the_m():
    x, y = torch.randn(2, DIM, dtype=torch.float64) * 0.5
    omega = torch.randn(200_000, DIM, dtype=torch.float64)
    cosines = (omega @ (x - y)).cos()
    error = cosines.std().item() / len(cosines) ** 0.5
    kernel = math.exp(-(x - y).square().sum().item() / 2)
    assert abs(cosines.mean().item() - kernel) < 4 * error
    assert abs(2**DIM * cosines.mean().item() - kernel) > 20 * error


def test_lemma_s2_prf_needs_the_square_of_the_norm():
    x, y = torch.randn(2, DIM, dtype=torch.float64) * 0.5
    omega = torch.randn(400_000, DIM, dtype=torch.float64)
    kernel = math.exp(-(x - y).square().sum().item() / 2)
    features = (omega @ (x + y)).exp()
    for norms, holds in ((x.square().sum() + y.square().sum(), True), (x.norm() + y.norm(), False)):
        estimates = features * math.exp(-norms)
        error = estimates.std().item() / len(estimates) ** 0.5
        assert (abs(estimates.mean().item() - kernel) < 4 * error) == holds


def test_average_of_linformer_in_the_lra_table():
    listops, text, retrieval, printed = 35.49, 53.49, 52.27, 52.56
    average = (listops + text + retrieval) / 3
    assert round(average, 2) == 47.08
    assert round(average, 2) != printed
