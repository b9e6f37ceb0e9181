"""The planted task: targets by definition, kernels that are found, and what is compared with them."""

import itertools
import json

import numpy as np
import pytest
import torch

from klformer.lab.analysis.kernel.command import KernelAnalysis
from klformer.lab.analysis.kernel.command import run as analyze
from klformer.lab.analysis.kernel.planted_results import _spread, held_out_pairs, planted_error
from klformer.lab.data import collate
from klformer.lab.runs.config import ExperimentConfig, preset
from klformer.lab.runs.train import train_run
from klformer.lab.tasks import Planted
from klformer.lab.tasks.planted import KERNELS, KernelReadout, PlantedData
from klformer.lab.training.progress import SilentReporter
from klformer.models import AttentionSpec


def task(kernel, **config):
    return Planted(PlantedData(kernel=kernel, **{"num_examples": 7, "max_len": 5, "dim": 3, **config}), quiet=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_targets_are_attention_with_the_kernel(kernel):
    made = task(kernel)
    examples = made.load("train")
    inputs = examples.first.values.reshape(7, 5, 7).astype(np.float64)
    for position, target in ((inputs[2], examples.targets[2]), (inputs[6], examples.targets[6])):
        q, k, v = position[:, :3] / 3**0.25, position[:, 3:6] / 3**0.25, position[:, 6]
        for i in range(5):
            d = q[i] - k
            weights = {
                "periodic": lambda d=d: 0.5 + 0.5 * np.cos(3 * d).mean(1),
                "gaussian": lambda d=d: np.exp(-(d**2).sum(1) / (2 * 0.4**2)),
                "mixture": lambda d=d: sum(np.exp(-(d**2).sum(1) / (2 * width**2)) for width in (0.3, 1.5)) / 2,
                "softmax": lambda i=i, q=q, k=k: np.exp(k @ q[i] / 0.4),
            }[kernel]()
            assert target[i] == pytest.approx((weights * v).sum() / weights.sum(), rel=1e-9)


def test_the_kernel_that_was_planted_has_no_error_and_a_factor_is_none():
    made = task("gaussian", dim=4)
    q, k = held_out_pairs(made)
    right = AttentionSpec.parse("rbf-rks:num_frequencies=20000,smoothing=0.0,lengthscale=0.4")
    model = KernelReadout(right, dim=4, max_len=5)
    error = planted_error(model.mechanism.double(), made, q[:50], k[:50], draws=5, seed=0)
    assert error.of_mean < 0.1
    assert error.of_mean < error.mean
    other = planted_error(
        KernelReadout(AttentionSpec.parse("rbf-rks:smoothing=0.0"), dim=4, max_len=5).mechanism.double(),
        made, q[:50], k[:50], draws=5, seed=0,
    )  # fmt: skip
    assert other.of_mean > 0.5


def config(attention, **training):
    whole = preset("laptop", "planted", AttentionSpec.parse(attention)).model_dump()
    whole["data"] |= {"dim": 2, "num_examples": 500}
    whole["training"] |= training
    return ExperimentConfig.model_validate(whole)


def test_a_periodic_kernel_is_found_and_compared(tmp_path, capsys):
    options = "num_frequencies=32,lengthscale=0.4,smoothing=0.5,learn_smoothing=true"
    learned = config(f"atoms-rks:{options}", max_steps=250)
    result = train_run(learned, tmp_path / "run", resume=False, reporter=SilentReporter())
    assert result["test"]["r2"] > 0.99
    assert result["kernel_moved"] > 0.05
    analyze(KernelAnalysis(run=tmp_path / "run", out=tmp_path / "out", quick=True))
    initial, trained = json.loads((tmp_path / "out" / "kernel-planted.json").read_text())["rows"]
    assert trained["error_of_mean"] < 0.1 < initial["error_of_mean"]
    assert (tmp_path / "out" / "kernel-planted.png").exists()
    moments = json.loads((tmp_path / "out" / "kernel-learning.json").read_text())["rows"]
    assert moments[0]["step"] == 0
    assert moments[0]["error"] == initial["error"]
    assert [row["step"] for row in moments] == sorted({row["step"] for row in moments})
    assert len(moments) > 1
    assert (tmp_path / "out" / "kernel-learning.png").exists()
    # The curves are kept as well: what was learned is near the planted kernel where they are drawn.
    for name, last in (("planted", {"kernel": "trained"}), ("learning", {"step": moments[-1]["step"]})):
        points = json.loads((tmp_path / "out" / f"kernel-{name}-profiles.json").read_text())["rows"]
        shown = [point for point in points if last.items() <= point.items()]
        assert len(shown) == 121
        assert max(abs(point["mean"] - point["planted"]) for point in shown) < 0.3
    assert "held-out pairs" in capsys.readouterr().out


def test_a_kernel_that_learns_nothing_trains_as_well(tmp_path):
    for attention in ("softmax", "gmm-prf:frozen=true"):
        result = train_run(
            config(attention, max_steps=3), tmp_path / attention, resume=False, reporter=SilentReporter()
        )
        assert result["steps"] == 3
        assert result.get("kernel_moved", 0.0) == 0.0


def test_padding_has_no_part_in_the_loss():
    objective = task("softmax").objective()
    made = task("softmax", max_len=5).load("train")
    outputs = torch.zeros(7, 9, 1)
    batch = collate(made, np.arange(7), pad_to=9)
    assert objective.loss_of(outputs, batch).item() == pytest.approx((made.targets**2).sum(), rel=1e-5)
    assert objective.count(outputs, batch) == 35


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 32, 1000])
def test_moments_are_different_the_newest_among_them_and_closer_at_the_beginning(count):
    chosen = _spread(list(range(count)), 5)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, 5)
    assert not count or chosen[-1] == count - 1
    gaps = [after - before for before, after in itertools.pairwise(chosen)]
    assert gaps == sorted(gaps)
