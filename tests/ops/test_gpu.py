"""What is for GPUs, without one: calls of torch's fused kernels on tensors without memory, and counts of launches."""

import pytest
import torch
from support import relative_error
from torch._subclasses.fake_tensor import FakeTensorMode

from klformer.bench.launches import Launches, count_launches
from klformer.bench.sizes import Sizes
from klformer.ops import spectral_product as op
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS
from klformer.ops.spectral_product.operands import SpectralKernel


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_softmaxes_in_half_precision_split_their_log_weights(dtype):
    half = BACKENDS["softmax_pair_half"]
    q, k, v = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (19, 23, 23))
    bias, omega = 4 * torch.randn(1, 2, 23) - 300, torch.randn(2, 16, 8).to(dtype).float()
    call = op.SpectralOperands(SpectralKernel(FEATURE_MAPS["prf"], omega), q, k, v, key_bias=bias)
    saved = half.forward(call)
    d_out = torch.randn_like(saved[0])
    gradients = half.backward(call, saved, d_out, ("omega", "key_bias"))
    whole = BACKENDS["chunked"]
    expected = whole.forward(call)
    wanted = whole.backward(call, expected, d_out, ("omega", "key_bias"))
    # Log-weights near -300 in one column would be off by up to 1 in bfloat16.
    tolerance = 2e-2 if dtype == torch.float16 else 1e-1
    assert relative_error(saved[0], expected[0]) < tolerance / 2
    assert all(relative_error(gradients[name], wanted[name]) < tolerance for name in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_calls_for_cuda_fit_their_schemas(dtype):
    """On tensors without memory, which take the kernels for CUDA."""
    check_the_calls_for_cuda(dtype)


@pytest.mark.parametrize("empty", ["batch", "length", "keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_for_cuda_are_not_asked_for_nothing(dtype, empty):
    asked = check_the_calls_for_cuda(dtype, **{empty: 0})
    # Without keys, queries still read frequencies; without queries, frequencies still read keys. Each way once.
    assert asked == {"batch": 0, "length": 2, "keys": 2}[empty]


def check_the_calls_for_cuda(dtype, *, batch=2, length=70, keys=90):
    """Results and gradients have the right shapes and types. Returns how often torch's kernels were asked."""
    backend = BACKENDS["softmax_pair_half"]
    sizes = [(batch, 3, length, 16), (batch, 3, keys, 16), (batch, 3, keys, 24)]
    q, k, v = (torch.empty(size, dtype=dtype, device="meta") for size in sizes)
    omega, bias = torch.empty(3, 40, 16, device="meta"), torch.empty(batch, 1, keys, device="meta")
    key_mask = torch.empty(batch, 1, keys, dtype=torch.bool, device="meta")
    kernel = SpectralKernel(FEATURE_MAPS["prf"], omega)
    call = op.SpectralOperands(kernel, q, k, v, key_mask=key_mask, key_bias=bias)
    with Launches() as calls:
        saved = backend.forward(call)
        gradients = backend.backward(call, saved, torch.empty_like(saved[0]), ("omega", "key_bias"))
    for got, want in zip(saved, backend.empty(call), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert {name: (x.shape, x.dtype) for name, x in gradients.items()} == {
        name: (x.shape, x.dtype) for name, x in call.tensors().items() if name != "key_mask"
    }
    return sum(count for name, count in calls.by_name.items() if "scaled_dot_product" in name)


def without_memory(dtype, *, device="cuda", **given):
    """A bidirectional PRF product on a device that need not be there."""
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 9, 8, dtype=dtype, device=device) for _ in range(3))
        kernel = SpectralKernel(FEATURE_MAPS["prf"], torch.empty(2, 16, 8, device=device), **given)
    return op.SpectralOperands(kernel, q, k, v)


@pytest.mark.parametrize("simplex", [False, True])
def test_on_cuda_torchs_kernels_are_taken_in_the_precisions_that_they_have(simplex):
    pair, half = BACKENDS["softmax_pair"], BACKENDS["softmax_pair_half"]
    for dtype, has in ((torch.float32, True), (torch.float16, True), (torch.bfloat16, True), (torch.float64, False)):
        call = without_memory(dtype, simplex=simplex)
        assert pair.suits(call) == pair.supports(call) == half.supports(call) == has
        assert not half.suits(call), "only who asks for it gets half precision"
    assert pair.supports(without_memory(torch.float64, device="cpu"))


@pytest.mark.parametrize(
    ("product", "most"),
    # Counted: 63, 89, 114, 876 and 183; another torch may cut an operation in two.
    [("prf softmax_pair", 66), ("prf", 93), ("rks", 119), ("prf causal", 900), ("rks causal", 190)],
)
def test_a_gpu_has_few_launches(product, most):
    """16,384 tokens of 8 heads in the pieces of a GPU."""
    sizes = Sizes(batch=1, heads=8, length=16384, head_dim=16, value_dim=16, frequencies=128)
    assert 20 < count_launches(product, sizes) <= most
