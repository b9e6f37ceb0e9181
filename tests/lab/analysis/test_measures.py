"""Variance, spectra, kernels and gradients: every measure against cases worked out by hand."""

import math

import numpy as np
import pytest
import torch

import klformer
from klformer.kernels import FastFoodSpectrum, GaussianMixtureSpectrum, GaussianSpectrum
from klformer.lab.analysis.eigenvalues import covariance, eigenvalues
from klformer.lab.analysis.kernel.measure import (
    attention_of_first_token,
    kernel_profile,
    main_directions,
    over_draws,
    sample_frequencies,
)
from klformer.lab.analysis.variance.measure import (
    count_votes,
    prediction_inconsistency,
    r_squared,
    relative_standard_deviation,
    variance_metrics,
)
from klformer.lab.data import Batch
from klformer.models import (
    AttentionSpec,
    ClassifierHead,
    EncoderConfig,
    SequenceClassifier,
    SequenceEmbedding,
    TransformerEncoder,
)
from research.gradients.measure import classifier_gradients, gradient_statistics


def two_class(outputs):
    """Scores (draws, N, 2) whose difference is the given output (draws, N)."""
    outputs = np.asarray(outputs, dtype=float)
    base = np.random.default_rng(0).normal(size=outputs.shape)
    return np.stack([base, base + outputs], axis=-1)


class TestVariance:
    def test_relative_standard_deviation_of_two_classes(self):
        outputs = [[1.0, -2.0], [3.0, -2.0], [5.0, -2.0], [3.0, -2.0]]
        # the first example: mean 3, deviation sqrt((4 + 0 + 4 + 0) / 4); the second never changes
        np.testing.assert_allclose(relative_standard_deviation(two_class(outputs)), [math.sqrt(2) / 3, 0], atol=1e-12)

    def test_relative_standard_deviation_ignores_scale_and_offset(self):
        scores = np.random.default_rng(1).normal(size=(7, 5, 4))
        offsets = np.random.default_rng(2).normal(size=(7, 5, 1))
        np.testing.assert_allclose(
            relative_standard_deviation(3 * scores + offsets), relative_standard_deviation(scores)
        )

    def test_relative_standard_deviation_of_three_classes(self):
        scores = np.array([[[2.0, 0.0, 1.0]], [[0.0, 2.0, 1.0]]])
        # centred: (1, -1, 0) and (-1, 1, 0): mean 0, so infinite; with a third draw (1, -1, 0): mean (1, -1, 0) / 3
        assert relative_standard_deviation(scores) == [np.inf]
        scores = np.concatenate([scores, scores[:1]])
        variance = 2 * (1 - 1 / 9)
        np.testing.assert_allclose(relative_standard_deviation(scores), [math.sqrt(variance) / (math.sqrt(2) / 3)])

    def test_prediction_inconsistency(self):
        outputs = [[1, -1, 2], [1, 1, 2], [-1, 1, 2], [1, -1, 2]]
        np.testing.assert_allclose(prediction_inconsistency(two_class(outputs)), [25, 50, 0])
        assert count_votes(two_class(outputs)).tolist() == [[1, 3], [2, 2], [0, 4]]

    def test_prediction_inconsistency_of_three_classes(self):
        labels = [0, 1, 1, 2, 1]
        scores = np.eye(3)[labels][:, None]
        np.testing.assert_allclose(prediction_inconsistency(scores), [40])

    def test_gain_with_voting(self):
        # three examples of class 1: right in 2 of 3, 2 of 3 and 0 of 3 draws
        outputs = [[1, -1, -1], [1, 1, -1], [-1, 1, -1]]
        metrics = variance_metrics(two_class(outputs), np.array([1, 1, 1]))
        assert metrics.accuracy == pytest.approx(4 / 9)
        assert metrics.voting_accuracy == pytest.approx(2 / 3)
        assert metrics.agv == pytest.approx(1.5)
        assert metrics.pi == pytest.approx(100 * (1 / 3 + 1 / 3 + 0) / 3)

    def test_r_squared(self):
        x = np.array([1.0, 2.0, 3.0, 4.0])
        assert r_squared(x, -2 * x + 1) == pytest.approx(1)
        # y = (1, 0, 0, 1): no linear relation
        assert r_squared(x, np.array([1.0, 0.0, 0.0, 1.0])) == pytest.approx(0)
        # covariance 1.5, variances 1.25 and 2.1875 (population), by hand
        assert r_squared(x, np.array([1.0, 1.0, 4.0, 4.0])) == pytest.approx(1.5**2 / (1.25 * 2.25))
        assert math.isnan(r_squared(x[:2], x[:2]))
        assert math.isnan(r_squared(x, np.ones(4)))
        assert math.isnan(r_squared(x, np.array([1.0, 2.0, np.inf, 4.0])))


class TestSpectra:
    def test_eigenvalues_of_a_mixture_are_those_of_its_covariance(self):
        encoder = small_encoder("gmm-prf:num_frequencies=8")
        with torch.no_grad():
            for number, layer in enumerate(encoder.layers):
                scale = layer.self_attention.mechanism.kernel.spectrum.scale  # logarithms of variances, (H, 1, D)
                scale.copy_(torch.arange(8.0).view(2, 1, 4) + number)
        found = eigenvalues(encoder)
        assert [(s.layer, s.head) for s in found] == [(1, 1), (1, 2), (2, 1), (2, 2)]
        torch.testing.assert_close(found[1].eigenvalues, torch.tensor([4.0, 5, 6, 7], dtype=torch.float64).exp())
        torch.testing.assert_close(found[2].eigenvalues, torch.tensor([1.0, 2, 3, 4], dtype=torch.float64).exp())

    def test_a_full_covariance(self):
        spectrum = GaussianMixtureSpectrum(num_heads=1, head_dim=3, num_frequencies=4)
        with torch.no_grad():
            spectrum.scale.copy_(torch.tensor([[2.0, 0, 0], [0, 0, 3.0], [0, 1.0, 0]]))
        values = torch.linalg.eigvalsh(covariance(spectrum))
        torch.testing.assert_close(values, torch.tensor([[[1.0, 4.0, 9.0]]], dtype=torch.float64))

    @pytest.mark.parametrize("kind", [GaussianSpectrum, FastFoodSpectrum])
    def test_other_distributions_are_estimated_and_left_as_they_were(self, kind):
        options = {"learn": "none", "init": "structured", "lengthscale": 1.0} if kind is FastFoodSpectrum else {}
        spectrum = kind(num_heads=2, head_dim=4, num_frequencies=64, **options)
        before = spectrum.frequencies().clone()
        estimate = covariance(spectrum, draws=200, generator=torch.Generator().manual_seed(0))
        assert torch.equal(spectrum.frequencies(), before)
        assert (estimate - torch.eye(4, dtype=torch.float64)).abs().max() < 0.1


class TestKernelView:
    def test_the_profile_of_a_gaussian_kernel(self):
        attention = klformer.build_attention("rbf-rks", num_heads=2, head_dim=4, num_frequencies=512, smoothing=0.0)
        direction = torch.nn.functional.normalize(torch.randn(2, 4, dtype=torch.float64), dim=-1)
        delta = torch.linspace(-2, 2, 9, dtype=torch.float64)
        profile = kernel_profile(attention.double(), direction, delta, draws=100, seed=0)
        error = (profile.mean - (-(delta**2) / 2).exp()).abs()
        assert (error <= 5 * profile.deviation / 10 + 1e-12).all()
        torch.testing.assert_close(profile.mean[:, 4], torch.ones(2, dtype=torch.float64))

    def test_the_profile_of_the_softmax_kernel(self):
        attention = klformer.build_attention("performer", num_heads=1, head_dim=4, num_frequencies=1024).double()
        direction = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
        delta = torch.tensor([-2.0, -1.5, -1.0, -0.5, 0.0], dtype=torch.float64)
        profile = kernel_profile(attention, direction, delta, draws=100, seed=0)
        # exp(q.k) with q = u, k = (1 + delta) u, relative to delta = 0
        torch.testing.assert_close(profile.mean[0], delta.exp(), atol=0.03, rtol=0)

    def test_the_main_direction_is_that_of_the_largest_variance(self):
        spectrum = GaussianMixtureSpectrum(num_heads=2, head_dim=3, num_frequencies=6, covariance="diagonal")
        with torch.no_grad():
            spectrum.scale.copy_(torch.tensor([[[0.0, 3.0, 1.0]], [[2.0, 0.0, 1.0]]]))
            spectrum.mean.zero_()
        directions = main_directions(spectrum, 2, draws=1, seed=0).abs()
        expected = torch.tensor([[[0.0, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 0, 1]]], dtype=torch.float64)
        torch.testing.assert_close(directions, expected)

    def test_means_that_are_apart_count_for_the_main_direction(self):
        spectrum = GaussianMixtureSpectrum(num_heads=1, head_dim=3, num_frequencies=6, covariance="diagonal")
        with torch.no_grad():
            spectrum.scale.copy_(torch.tensor([[[-4.0, -2.0, -3.0]]]))
            spectrum.mean.copy_(torch.tensor([[[2.0, 0.0, 0.0]]]))
        directions = main_directions(spectrum, 1, draws=1, seed=0).abs()
        torch.testing.assert_close(directions, torch.tensor([[[1.0, 0, 0]]], dtype=torch.float64))

    def test_sampling_leaves_the_noise_alone(self):
        spectrum = GaussianSpectrum(num_heads=1, head_dim=3, num_frequencies=5)
        before = spectrum.frequencies().clone()
        assert sample_frequencies(spectrum, draws=4, seed=9).shape == (1, 20, 3)
        for _ in over_draws(spectrum, 2, 9):
            assert not torch.equal(spectrum.frequencies(), before)
        assert torch.equal(spectrum.frequencies(), before)

    def test_weights_of_the_first_token(self):
        encoder = small_encoder("linear-elu", dropout=0.0).double()
        x = torch.randn(1, 5, 8, dtype=torch.float64)
        key_mask = torch.tensor([[True, True, True, True, False]])
        rows = attention_of_first_token(encoder, lambda: encoder(x, key_mask=key_mask), draws=1, seed=0)
        assert [row.shape for row in rows] == [(2, 5), (2, 5)]
        for row in rows:
            torch.testing.assert_close(row.sum(-1), torch.ones(2, dtype=torch.float64))
            assert row[:, 4].eq(0).all()
        layer = encoder.layers[0].self_attention
        normed = encoder.layers[0].self_norm(x)
        q, k = (torch.nn.functional.elu(projection(normed)) + 1 for projection in (layer.query, layer.key))
        expected = (q[0, 0, :4] * k[0, :4, :4]).sum(-1)
        torch.testing.assert_close(rows[0][0, :4], expected / expected.sum())

    def test_attention_without_features_is_refused(self):
        encoder = small_encoder("softmax", num_layers=1)
        with pytest.raises(ValueError, match="SoftmaxAttention is not a kernel"):
            attention_of_first_token(encoder, lambda: None, draws=1, seed=0)


def small_encoder(attention, **sizes):
    small = {"model_dim": 8, "num_layers": 2, "num_heads": 2, "ffn_dim": 4}
    return TransformerEncoder(EncoderConfig(attention=attention, **small | sizes))


def small_classifier(attention="gmm-rks", **options):
    return SequenceClassifier(
        SequenceEmbedding(model_dim=8, max_len=6, vocab_size=5),
        small_encoder(AttentionSpec(name=attention, options=options), dropout=0.1),
        ClassifierHead(model_dim=8, hidden_dim=7, num_outputs=3),
    )


def small_batch(size=4):
    return Batch(
        inputs=torch.randint(1, 5, (size, 6)),
        key_mask=torch.ones(size, 6, dtype=torch.bool),
        targets=torch.arange(size) % 3,
        ids=torch.arange(size),
        num_tokens=6 * size,
    )


class TestGradients:
    def test_against_autograd_through_the_bias(self):
        """The gradient at a hidden unit, summed over examples, is the gradient of its bias."""
        model, batch = small_classifier(num_frequencies=8), small_batch()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        gradients = classifier_gradients(model, batch, draws=3, seed=5)
        assert gradients.shape == (3, 4, 7)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert model.training
        model.eval()
        for draw in range(3):
            klformer.resample(model, klformer.lab.training.seeds.generator_for(5, "gradients", draw))
            scores = model(batch.inputs, batch.key_mask)
            loss = torch.nn.functional.cross_entropy(scores, batch.targets, reduction="sum")
            (expected,) = torch.autograd.grad(loss, [model.head[0].bias])
            torch.testing.assert_close(gradients[draw].sum(0), expected, atol=1e-5, rtol=1e-4)

    def test_statistics(self):
        # two draws, two examples, one unit: 1, 3 / -1, 7; the passes have means 2 and 3
        statistics = gradient_statistics(torch.tensor([[[1.0], [3.0]], [[-1.0], [7.0]]]))
        assert statistics.per_pass_deviation == pytest.approx(0.5)
        assert statistics.per_pass_mean_absolute == pytest.approx(2.5)
        assert statistics.per_example_deviation == pytest.approx(math.sqrt((60 - 4 * 2.5**2) / 4))
        assert statistics.per_example_mean_absolute == pytest.approx(3.0)
        # the examples vary by +-1 and +-2 over the draws
        assert statistics.per_example_deviation_of_draws == pytest.approx(math.sqrt((1 + 4) / 2))

    def test_statistics_are_means_over_the_units(self):
        # one example, two draws; units 1, 3 and -4, -4: the absolute of a mean would be another number
        statistics = gradient_statistics(torch.tensor([[[1.0, -4.0]], [[3.0, -4.0]]]))
        assert statistics.per_pass_deviation == statistics.per_example_deviation == pytest.approx((1 + 0) / 2)
        assert statistics.per_pass_mean_absolute == pytest.approx((2 + 4) / 2)

    def test_without_noise_the_draws_do_not_differ(self):
        gradients = classifier_gradients(small_classifier("softmax"), small_batch(), draws=3, seed=0)
        statistics = gradient_statistics(gradients)
        assert statistics.per_pass_deviation == statistics.per_example_deviation_of_draws == 0
        assert statistics.per_example_deviation > 0
