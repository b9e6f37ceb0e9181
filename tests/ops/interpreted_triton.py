"""The kernels for GPUs in Triton's interpreter: every line runs, on memory that is NaN before it is written.

Run by `test_triton.py` in a process of its own: TRITON_INTERPRET=1 must be there before Triton is imported.
"""

import pytest
import torch
from support import relative_error

from benchmarks.launches import Launches
from klformer.ops import spectral_product as op
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS, Call, SpectralKernel, self_check
from klformer.ops.spectral_product.autograd import empty_results
from klformer.ops.triton import launches

CPU = torch.device("cpu")


def test_every_form_is_right():
    found = list(self_check.check(BACKENDS["triton"], CPU, feature_map="prf", oracle="reference"))
    assert not [finding.describe() for finding in found if finding.is_wrong or finding.refused]
    assert all(finding.error < 1e-5 for finding in found), "much better than what is allowed of a GPU"


def product(q, k, v, omega, bias, *, backend, dtype, causal, **envelope):
    """Results, log-sums and gradients in some precision."""
    tensors = [None if x is None else x.detach().to(dtype).requires_grad_() for x in (q, k, v, omega, bias)]
    kernel = SpectralKernel(FEATURE_MAPS["prf"], tensors[3], frequency_bias=tensors[4], **envelope)
    results = op.attend(kernel, *tensors[:3], causal=causal, backend=backend)
    wanted = [x for x in tensors if x is not None]
    weights = [torch.cos(torch.arange(x.numel()).to(dtype)).view(x.shape) for x in results]
    total = sum((w * x).sum() for w, x in zip(weights, results, strict=True))
    return [*results, *torch.autograd.grad(total, wanted)]


CASES = [
    pytest.param((1, 1, 1, 3, 2, 1), 1.0, {}, id="one"),
    pytest.param((2, 2, 33, 7, 5, 17), 1.0, {"shared": True, "weighted": True}, id="odd"),
    pytest.param((1, 2, 70, 100, 128, 40), 1.0, {"shared": True, "strided": True}, id="wide"),
    pytest.param((1, 2, 65, 16, 16, 70), 1.0, {"weighted": True, "strided": True, "simplex": True}, id="simplex"),
    pytest.param((1, 2, 40, 8, 6, 20), 32.0, {"norm_coefficient": 0.5}, id="far"),
    pytest.param((1, 2, 40, 8, 6, 20), 32.0, {"weighted": True, "lost": True}, id="lost"),
    pytest.param((1, 2, 70, 8, 6, 20), 4.0, {"late": True, "weighted": True, "simplex": True}, id="late-simplex"),
    pytest.param((1, 2, 70, 8, 6, 20), 4.0, {"late": True, "lost": True}, id="late"),
]


@pytest.mark.parametrize(("sizes", "std", "options"), CASES)
def test_causal_equals_the_definition_with_gradients(sizes, std, options, monkeypatch):
    check_against_the_definition(sizes, std, options, monkeypatch, causal=True)


# What is far or lost is a matter of pairs inside a chunk.
@pytest.mark.parametrize(("sizes", "std", "options"), CASES[:4])
def test_bidirectional_equals_the_definition_with_gradients(sizes, std, options, monkeypatch):
    check_against_the_definition(sizes, std, options, monkeypatch, causal=False)


def check_against_the_definition(sizes, std, options, monkeypatch, *, causal):
    batch, heads, length, dim, values, frequencies = sizes

    def tokens(size):
        if options.get("strided"):
            return torch.randn(batch, length, heads, size).transpose(1, 2)
        return torch.randn(batch, heads, length, size)

    q, k, v = std * tokens(dim), std * tokens(dim), tokens(values)
    if options.get("late"):
        k[:, :, 50] *= 30  # what comes before it underflows for those who do not see it
    omega = torch.randn(1 if options.get("shared") else heads, frequencies, dim)
    bias = torch.randn(1, frequencies) if options.get("weighted") else None
    envelope = {name: options[name] for name in ("simplex", "norm_coefficient") if name in options}
    lost, attend = [], launches.Launcher.attend
    monkeypatch.setattr(launches.Launcher, "attend", lambda *given: lost.append((x := attend(*given))[2]) or x)
    found = [
        product(q, k, v, omega, bias, backend=backend, dtype=dtype, causal=causal, **envelope)
        for backend, dtype in (("reference", torch.float64), ("triton", torch.float32), ("chunked", torch.float32))
    ]
    for index, (expected, actual, chunked) in enumerate(zip(*found, strict=True)):
        # Scores of hundreds have few digits left: then results are no worse than those of the product in chunks.
        allowed = max(1e-5, 20 * relative_error(chunked, expected)) if index < 2 else 1e-4
        assert relative_error(actual, expected) < allowed
    if causal and options.get("lost"):
        assert lost[0].any(), "the pairs were to be taken one by one"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_that_of_the_product_in_chunks(dtype):
    q, k, v = (torch.randn(1, 2, 40, size).to(dtype) for size in (8, 8, 6))
    frequencies = torch.randn(2, 20, 8)

    def found(backend, precision):
        tensors = [x.to(precision).requires_grad_() for x in (q, k, v)]
        omega = frequencies.to(torch.float64 if precision == torch.float64 else torch.float32).requires_grad_()
        out, _ = op.attend(
            SpectralKernel(FEATURE_MAPS["prf"], omega, simplex=True), *tensors, causal=True, backend=backend
        )
        assert out.dtype == precision
        weights = torch.cos(torch.arange(out.numel())).view(out.shape).to(dtype).to(precision)
        return [out, *torch.autograd.grad(out, (*tensors, omega), weights)]

    # The interpreter cuts off where a GPU rounds to bfloat16.
    factor = 2.5 if dtype == torch.bfloat16 else 1.2
    for expected, actual, chunked in zip(
        found("reference", torch.float64), found("triton", dtype), found("chunked", dtype), strict=True
    ):
        assert relative_error(actual, expected) < factor * relative_error(chunked, expected) + 1e-4


def test_calls_that_it_does_not_serve_have_a_reason(monkeypatch):
    backend = BACKENDS["triton"]

    def reason(feature_map="prf", dim=8, length=5, dtype=torch.float32):
        q = torch.randn(1, 2, length, dim, dtype=dtype)
        needs = FEATURE_MAPS[feature_map].needs_frequencies
        kernel = SpectralKernel(FEATURE_MAPS[feature_map], torch.randn(2, 4, dim) if needs else None)
        return backend.supports(Call("product", kernel, q=q, k=q, v=q))

    assert reason() is None
    assert reason("elu") == "feature_map 'elu' is not exponential"
    assert reason(dim=129) == "heads are wider than 128"
    assert reason(length=0) == "there are no tokens"
    assert reason(dtype=torch.float64) == "it computes in float32, not in torch.float64"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert reason() == "it is for GPUs, not for cpu"


@pytest.mark.parametrize("weighted", [False, True])
def test_causal_forward_and_backward_are_six_launches(monkeypatch, weighted):
    """16,384 tokens, on tensors without memory: our kernels and one of torch; one more where keys have weights."""
    ours = []
    monkeypatch.setattr(launches, "launch", lambda kernel, grid, *given, **constants: ours.append(kernel.fn.__name__))
    q, k, v = (torch.empty(1, 8, 16384, 64, device="meta") for _ in range(3))
    kernel = SpectralKernel(FEATURE_MAPS["prf"], torch.empty(8, 128, 64, device="meta"))
    bias = torch.empty(1, 8, 16384, device="meta") if weighted else None
    call = Call("causal", kernel, q=q, k=k, v=v, key_bias=bias)
    with Launches() as theirs:
        outputs = launches.forward(call)
        d_log = torch.empty(1, 8, 16384, device="meta")
        launches.backward(call, outputs, [torch.empty_like(q), d_log, None, None, None])
    always = ["states_kernel", "attend_kernel", "states_kernel", "gradients_kernel", "gradients_kernel"]
    assert ours == (["envelope_kernel", *always] if weighted else always)
    assert theirs.by_name.total() == 1, theirs.by_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("step", ["absorb", "read", "causal"])
def test_compiled_programs_know_what_is_kept(step, dtype):
    q, k, v = torch.randn(3, 1, 2, 5, 8).to(dtype)
    kernel = SpectralKernel(FEATURE_MAPS["prf"], torch.randn(2, 4, 8), simplex=True)
    call = Call("absorb", kernel, k=k, v=v)
    if step == "causal":
        call = Call("causal", kernel, q=q, k=k, v=v)
    elif step == "read":
        call = Call("read", kernel, q=q, sums=BACKENDS["triton"].absorb(call))
    backend = BACKENDS["triton"]
    expected = empty_results(call) + backend.empty_kept(call)
    found = backend.forward(call, keep=True)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
