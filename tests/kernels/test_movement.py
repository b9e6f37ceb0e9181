"""How far a kernel has moved: nothing by noise, and by as much as its parameters were changed."""

import copy
import math

import pytest
import torch

import klformer
from klformer.kernels.movement import kernel_movement


def kernel(name, **options):
    return klformer.build_attention(name, num_heads=3, head_dim=5, num_frequencies=8, **options).kernel


@pytest.mark.parametrize("name", ["gmm-rks", "gmm-prf", "fastfood-rks", "generative-prf", "atoms-prf", "performer"])
def test_noise_does_not_move_a_kernel(name):
    present = kernel(name)
    start = copy.deepcopy(present)
    klformer.resample(present, torch.Generator().manual_seed(3))
    before = {key: value.clone() for key, value in present.state_dict().items()}
    movement = kernel_movement(start, present)
    assert (movement.frequencies, movement.kernel) == (0.0, 0.0)
    assert all(torch.equal(value, before[key]) for key, value in present.state_dict().items())


def test_frequencies_that_are_a_tenth_longer_have_moved_by_a_tenth():
    present = kernel("atoms-rks")
    start = copy.deepcopy(present)
    with torch.no_grad():
        present.spectrum.omega *= 1.1
    movement = kernel_movement(start, present)
    assert movement.frequencies == pytest.approx(0.1, rel=1e-5)
    assert movement.kernel > 0


def test_a_kernel_moves_while_its_frequencies_rest():
    present = kernel("atoms-rks", smoothing=0.5, learn_smoothing=True)
    start = copy.deepcopy(present)
    with torch.no_grad():
        present.log_smoothing += math.log(2)
    movement = kernel_movement(start, present)
    assert movement.frequencies == 0.0
    assert movement.kernel > 0.1


def test_a_kernel_without_frequencies_does_not_move():
    elu = klformer.build_attention("linear-elu", num_heads=1, head_dim=2).kernel
    assert kernel_movement(elu, elu) is None


@pytest.mark.needs("klformer.lab")
def test_the_callback_measures_every_layer_against_the_start():
    from klformer.lab.training.callbacks import KernelMovement

    layers = torch.nn.ModuleList([kernel("atoms-rks"), kernel("gmm-rks")])
    callback = KernelMovement(layers)
    assert callback.measure() == {"kernel_frequencies_moved": 0.0, "kernel_moved": 0.0}
    with torch.no_grad():
        layers[0].spectrum.omega *= 1.2
    first, second = callback.result()["kernel_movement_by_layer"]
    assert first["frequencies"] == pytest.approx(0.2, rel=1e-5)
    assert second == {"frequencies": 0.0, "kernel": 0.0}
    assert callback.measure()["kernel_frequencies_moved"] == pytest.approx(0.1, rel=1e-5)
    assert KernelMovement(torch.nn.Linear(2, 2)).result() == {}
