"""What is for GPUs, without one: calls of torch's fused kernels on tensors without memory, and counts of launches."""

from collections import Counter

import pytest
import torch
from support import relative_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from klformer.ops import spectral_product as op
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS
from klformer.ops.spectral_product.chunked import ChunkedBackend, tiling
from klformer.ops.spectral_product.chunked import causal as causal_product
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
    with Calls() as calls:
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


class Calls(TorchDispatchMode):
    """Counts calls that would be launches on a GPU: all but views and allocations."""

    QUIET = frozenset(
        {
            "_unsafe_view",
            "alias",
            "as_strided",
            "detach",
            "empty",
            "empty_like",
            "expand",
            "new_empty",
            "promote_types",
            "select",
            "slice",
            "split",
            "squeeze",
            "t",
            "transpose",
            "unbind",
            "unsqueeze",
            "view",
        }
    )

    def __init__(self):
        super().__init__()
        self.by_name = Counter()

    @property
    def count(self):
        return self.by_name.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.by_name[name] += name not in self.QUIET
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("feature_map", "causal", "most"),
    # Counted: 89, 114, 876 and 183; another torch may cut an operation in two.
    [("prf", False, 93), ("rks", False, 119), ("prf", True, 900), ("rks", True, 190)],
)
def test_a_gpu_has_few_launches(monkeypatch, feature_map, causal, most):
    """16,384 tokens of 8 heads in the pieces of a GPU."""
    q, k, v = (torch.empty(1, 8, 16384, 16, device="meta") for _ in range(3))
    kernel = SpectralKernel(FEATURE_MAPS[feature_map], torch.empty(8, 128, 16, device="meta"))
    call, backend = op.SpectralOperands(kernel, q, k, v, causal=causal), ChunkedBackend("gpu", recompute="always")
    monkeypatch.setattr(causal_product, "_lost_anything", lambda lost: False)
    with Calls() as calls:
        saved = backend.forward(call)
        if causal:
            saved[-1] = torch.full(saved[-1].shape, tiling.GPU_CAUSAL_CHUNK)
        backend.backward(call, saved, torch.empty_like(q), ("omega",))
    assert 20 < calls.count <= most
