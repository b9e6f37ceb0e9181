"""What is for GPUs, without one: calls of torch's fused kernels on tensors without memory, and counts of launches."""

import pytest
import torch
from support import relative_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS, Call, SpectralKernel, Sums, choose_backend, explain_backends
from klformer.ops.spectral_product.autograd import empty_results


def step_by_step(backend, kernel, q, k, v, **given):
    """Absorb and read, forward and backward, as a fused backend does them: the result, and gradients by name."""
    absorb = Call("absorb", kernel, k=k, v=v, **given)
    absorbed = backend.forward(absorb, keep=True)
    read = Call("read", kernel, q=q, sums=Sums(*absorbed))
    outputs = backend.forward(read, keep=True)
    d_read = backend.backward(read, outputs, [torch.ones_like(outputs[0]), None], ("q", *Sums._fields, "omega"))
    d_sums = [d_read["values"], d_read["weights"], None]
    d_absorb = backend.backward(absorb, absorbed, d_sums, ("k", "v", "omega", "key_bias"))
    return absorbed, outputs, d_read, d_absorb


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_softmaxes_in_half_precision_split_their_log_weights(dtype):
    q, k, v = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (19, 23, 23))
    bias, omega = 4 * torch.randn(1, 2, 23) - 300, torch.randn(2, 16, 8).to(dtype).float()
    operands = SpectralKernel(FEATURE_MAPS["prf"], omega), q, k, v
    found = [step_by_step(BACKENDS[name], *operands, key_bias=bias) for name in ("flash_half", "chunked")]
    # Log-weights near -300 in one column would be off by up to 1 in bfloat16.
    tolerance = 2e-2 if dtype == torch.float16 else 1e-1
    (_, (out, _), *got), (_, (expected, _), *wanted) = found
    assert relative_error(out, expected) < tolerance / 2
    for mine, its in zip(got, wanted, strict=True):
        assert all(relative_error(mine[name], its[name]) < tolerance for name in mine)


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


class Calls(TorchDispatchMode):
    """Notes the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def check_the_calls_for_cuda(dtype, *, batch=2, length=70, keys=90):
    """Results and gradients have the right shapes and types. Returns how often torch's kernels were asked."""
    backend = BACKENDS["flash_half"]
    sizes = [(batch, 3, length, 16), (batch, 3, keys, 16), (batch, 3, keys, 24)]
    q, k, v = (torch.empty(size, dtype=dtype, device="meta") for size in sizes)
    omega, bias = torch.empty(3, 40, 16, device="meta"), torch.empty(batch, 1, keys, device="meta")
    key_mask = torch.empty(batch, 1, keys, dtype=torch.bool, device="meta")
    kernel = SpectralKernel(FEATURE_MAPS["prf"], omega)
    with Calls() as calls:
        absorbed, outputs, d_read, d_absorb = step_by_step(backend, kernel, q, k, v, key_mask=key_mask, key_bias=bias)
    absorb, read = Call("absorb", kernel, k=k, v=v), Call("read", kernel, q=q, sums=Sums(*absorbed))
    for got, call in ((absorbed, absorb), (outputs, read)):
        for x, like in zip(got, empty_results(call), strict=True):
            assert (x.shape, x.dtype) == (like.shape, like.dtype)
    tensors = {"q": q, "k": k, "v": v, "omega": omega, "key_bias": bias} | Sums(*absorbed)._asdict()
    for name, gradient in (d_read | d_absorb).items():
        assert gradient.shape == tensors[name].shape
    return sum("scaled_dot_product" in name for name in calls.names)


def without_memory(dtype, *, device="cuda", **given):
    """A bidirectional PRF product on a device that need not be there."""
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 9, 8, dtype=dtype, device=device) for _ in range(3))
        kernel = SpectralKernel(FEATURE_MAPS["prf"], torch.empty(2, 16, 8, device=device), **given)
    return Call("product", kernel, q=q, k=k, v=v)


@pytest.mark.parametrize("simplex", [False, True])
def test_on_cuda_torchs_kernels_are_taken_in_the_precisions_that_they_have(simplex):
    flash, half = BACKENDS["flash"], BACKENDS["flash_half"]
    for dtype, has in ((torch.float32, True), (torch.float16, True), (torch.bfloat16, True), (torch.float64, False)):
        call = without_memory(dtype, simplex=simplex)
        assert (flash.supports(call) is None) == (half.supports(call) is None) == has
        assert choose_backend(call).name == ("flash" if has else "chunked"), "only who asks for it gets half precision"
    on_cpu = without_memory(torch.float64, device="cpu")
    assert "it is for CUDA" in explain_backends(on_cpu)["flash"]
    assert choose_backend(on_cpu).name == "chunked"


@pytest.mark.needs("klformer.lab")
@pytest.mark.parametrize(
    ("product", "most"),
    # Counted: 63, 87, 101, 506 and 109; another torch may cut an operation in two.
    [("prf flash", 66), ("prf", 91), ("rks", 106), ("prf causal", 525), ("rks causal", 114)],
)
def test_a_gpu_has_few_launches(product, most):
    """16,384 tokens of 8 heads in the pieces of a GPU."""
    from benchmarks.launches import count_launches
    from klformer.lab.bench.subjects import Sizes

    sizes = Sizes(batch=1, heads=8, length=16384, head_dim=16, value_dim=16, frequencies=128)
    assert 20 < count_launches(product, sizes) <= most
