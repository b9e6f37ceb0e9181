"""Groups of parameters: the kernels, which do not decay by default, and norms and biases, by rule."""

import torch
from torch import nn

import klformer
from klformer.lab.training.config import OptimiserConfig
from klformer.lab.training.optimiser import (
    build_optimiser,
    kernel_parameters,
    norms_and_biases,
    parameter_groups,
    set_learning_rate,
)


def model():
    attention = klformer.build_attention("generative-rks", num_heads=2, head_dim=4, max_len=8)
    return nn.ModuleDict({"attention": attention, "norm": nn.LayerNorm(3), "linear": nn.Linear(3, 2)})


def names_of(built, group):
    names = {parameter: name for name, parameter in built.named_parameters()}
    return {names[parameter] for parameter in group["params"]}


def test_where_all_decay_alike_there_is_one_group_in_the_order_of_the_model():
    built = model()
    built["linear"].bias.requires_grad_(False)
    (group,) = parameter_groups(built, OptimiserConfig(weight_decay=0.3, kernel_weight_decay=None))
    expected = [parameter for parameter in built.parameters() if parameter.requires_grad]
    assert all(a is b for a, b in zip(group["params"], expected, strict=True))
    assert (group["weight_decay"], group["rate_factor"]) == (0.3, 1.0)


def test_kernels_do_not_decay_by_default():
    built = model()
    by_decay = {group["weight_decay"]: names_of(built, group) for group in parameter_groups(built, OptimiserConfig())}
    assert by_decay == {
        0.0: kernel_parameters(built),
        0.1: set(dict(built.named_parameters())) - kernel_parameters(built),
    }


def test_smoothing_and_temperature_are_the_kernels():
    options = {"learn_smoothing": True, "learn_temperature": True}
    built = klformer.build_attention("gmm-rks", num_heads=2, head_dim=4, num_frequencies=4, **options)
    assert {"kernel.log_smoothing", "kernel.log_temperature"} <= kernel_parameters(built)


def test_kernels_are_the_parameters_of_spectral_distributions():
    built = model()
    kernel = kernel_parameters(built)
    assert kernel
    assert all(name.startswith("attention.") and "spectrum" in name for name in kernel)
    config = OptimiserConfig(weight_decay=0.3, kernel_learning_rate_factor=10.0, kernel_weight_decay=0.0)
    first, second = parameter_groups(built, config)
    assert names_of(built, first) == kernel
    assert (first["weight_decay"], first["rate_factor"]) == (0.0, 10.0)
    assert (second["weight_decay"], second["rate_factor"]) == (0.3, 1.0)
    optimiser = build_optimiser(built, config)
    set_learning_rate(optimiser, 0.5)
    assert [group["lr"] for group in optimiser.param_groups] == [5.0, 0.5]


def test_norms_and_biases_need_not_decay():
    built = model()
    assert {"norm.weight", "norm.bias", "linear.bias"} <= norms_and_biases(built)
    assert "linear.weight" not in norms_and_biases(built)
    groups = parameter_groups(
        built, OptimiserConfig(weight_decay=0.3, decay_norms_and_biases=False, kernel_weight_decay=None)
    )
    by_decay = {group["weight_decay"]: names_of(built, group) for group in groups}
    assert by_decay[0.0] == norms_and_biases(built)
    assert "linear.weight" in by_decay[0.3]


def test_groups_that_do_not_differ_update_as_one():
    results = []
    for factor in (1.0, 1.0 + 1e-12):
        torch.manual_seed(0)
        built = model()
        optimiser = build_optimiser(
            built, OptimiserConfig(kernel_learning_rate_factor=factor, kernel_weight_decay=None)
        )
        assert len(optimiser.param_groups) == (1 if factor == 1.0 else 2)
        for parameter in built.parameters():
            parameter.grad = torch.ones_like(parameter)
        set_learning_rate(optimiser, 0.25)
        optimiser.step()
        results.append([parameter.detach().clone() for parameter in built.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
