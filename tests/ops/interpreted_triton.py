"""The kernels for GPUs in Triton's interpreter: every line runs, on memory that is NaN before it is written.

Run by `test_triton.py` in a process of its own: TRITON_INTERPRET=1 must be there before Triton is imported.
"""

import sys

import pytest
import torch
from support import relative_error
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

import klformer
from benchmarks.launches import Launches
from klformer.ops import near
from klformer.ops import spectral_product as op
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import BACKENDS, Call, SpectralKernel, Sums, self_check
from klformer.ops.spectral_product.autograd import empty_results
from klformer.ops.triton import near_calls, prf_calls, rks_calls
from klformer.ops.triton.launches import Launcher

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def faster_calls():
    """A launch prepares Triton's language; the interpreter does it again in every function that a kernel calls, which
    takes a third of the time."""
    usual = InterpretedFunction.__call__

    def call(self, *given, **named):
        if self.fn.__module__.startswith("klformer"):
            return self.rewrite()(*given, **named)
        return usual(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


@pytest.mark.parametrize("feature_map", ["prf", "rks"])
def test_every_form_is_right(feature_map, monkeypatch):
    # One of cosines that has all that there is.
    all_of_it = ("rks", {}, ("frequency_bias", "pair_offset", "smoothing", "key_bias"))
    kernels = {name: kernel for name, kernel in self_check.KERNELS.items() if kernel[0] == "prf"}
    monkeypatch.setattr(self_check, "KERNELS", kernels | {"rks": all_of_it})
    monkeypatch.setattr(self_check, "HEADS", 1)  # several are elsewhere
    found = list(self_check.check(BACKENDS["triton"], CPU, feature_map=feature_map, oracle="reference"))
    assert found
    assert not [finding.describe() for finding in found if finding.is_wrong or finding.refused]
    assert all(finding.error < 1e-5 for finding in found), "much better than what is allowed of a GPU"


def product(tensors, *, backend, dtype, causal, feature_map="prf", **envelope):
    """Results, log-sums and gradients in some precision."""
    tensors = {name: x.detach().to(dtype).requires_grad_() for name, x in tensors.items() if x is not None}
    of_kernel = {name: x for name, x in tensors.items() if name not in ("q", "k", "v")}
    kernel = SpectralKernel(FEATURE_MAPS[feature_map], **of_kernel, **envelope)
    qkv = (tensors[name] for name in ("q", "k", "v"))
    results = op.attend(kernel, *qkv, causal=causal, backend=backend)
    weights = [torch.cos(torch.arange(x.numel()).to(dtype)).view(x.shape) for x in results]
    total = sum((w * x).sum() for w, x in zip(weights, results, strict=True))
    return [*results, *torch.autograd.grad(total, list(tensors.values()))]


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
COSINES = [
    pytest.param((1, 1, 1, 3, 2, 1), 1.0, {}, id="one"),
    pytest.param((2, 2, 33, 7, 5, 17), 1.0, {"shared": True, "weighted": True, "smoothing": 2.0}, id="odd"),
    pytest.param((1, 1, 35, 100, 128, 130), 0.1, {"shared": True, "strided": True, "smoothing": 0.1}, id="wide"),
    pytest.param((1, 2, 70, 8, 6, 20), 9.0, {"weighted": True, "smoothing": 0.3, "floor": True}, id="floor"),
    pytest.param((2, 2, 34, 8, 6, 20), 2.0, {"paired": True, "smoothing": 0.2, "floor": True}, id="floor-pairs"),
    pytest.param(
        (1, 2, 40, 16, 16, 20), 0.3, {"paired": True, "weighted": True, "strided": True, "smoothing": 1.0}, id="pairs"
    ),
]


@pytest.mark.parametrize(("sizes", "std", "options"), CASES)
def test_causal_equals_the_definition_with_gradients(sizes, std, options, monkeypatch):
    check_against_the_definition(sizes, std, options, monkeypatch, causal=True)


# What is far or lost is a matter of pairs inside a chunk.
@pytest.mark.parametrize(("sizes", "std", "options"), CASES[:4])
def test_bidirectional_equals_the_definition_with_gradients(sizes, std, options, monkeypatch):
    check_against_the_definition(sizes, std, options, monkeypatch, causal=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sizes", "std", "options"), COSINES)
def test_cosines_equal_the_definition_with_gradients(sizes, std, options, causal, monkeypatch):
    check_against_the_definition(sizes, std, options | {"feature_map": "rks"}, monkeypatch, causal=causal)


def check_against_the_definition(sizes, std, options, monkeypatch, *, causal):
    batch, heads, length, dim, values, frequencies = sizes

    def tokens(size):
        if options.get("strided"):
            return torch.randn(batch, length, heads, size).transpose(1, 2)
        return torch.randn(batch, heads, length, size)

    tensors = {"q": std * tokens(dim), "k": std * tokens(dim), "v": tokens(values)}
    if options.get("late"):
        tensors["k"][:, :, 50] *= 30  # what comes before it underflows for those who do not see it
    tensors["omega"] = torch.randn(1 if options.get("shared") else heads, frequencies, dim)
    tensors["frequency_bias"] = torch.randn(1, frequencies) if options.get("weighted") else None
    tensors["pair_offset"] = torch.randn(1, dim) if options.get("paired") else None
    tensors["smoothing"] = torch.tensor([options["smoothing"]]) if "smoothing" in options else None
    envelope = {name: options[name] for name in ("simplex", "norm_coefficient", "feature_map") if name in options}
    lost, attend = [], prf_calls.PrfLauncher.attend
    monkeypatch.setattr(prf_calls.PrfLauncher, "attend", lambda *given: lost.append((x := attend(*given))[2]) or x)
    found = [
        product(tensors, backend=backend, dtype=dtype, causal=causal, **envelope)
        for backend, dtype in (("reference", torch.float64), ("triton", torch.float32), ("chunked", torch.float32))
    ]
    for index, (expected, actual, chunked) in enumerate(zip(*found, strict=True)):
        # Scores of hundreds have few digits left: then results are no worse than those of the product in chunks.
        allowed = max(1e-5, 20 * relative_error(chunked, expected)) if index < 2 else 1e-4
        assert relative_error(actual, expected) < allowed
    if causal and options.get("lost"):
        assert lost[0].any(), "the pairs were to be taken one by one"
    if options.get("floor"):
        without = product(
            tensors | {"smoothing": None}, backend="reference", dtype=torch.float64, causal=causal, **envelope
        )
        assert without[1].isnan().any(), "some means were to be negative"


def test_neighbours_are_right_in_every_form(monkeypatch):
    monkeypatch.setattr(self_check, "HEADS", 1)
    found = list(self_check.check_near(near.near_kernels(), CPU))
    assert len(found) == 3
    assert not [finding.describe() for finding in found if finding.is_wrong or finding.error > 1e-5]


@pytest.mark.parametrize(
    ("sizes", "window", "causal", "before"),
    [
        pytest.param((2, 1, 1, 1, 3, 2), 0, False, 0, id="one"),
        pytest.param((1, 2, 45, 45, 7, 5), 3, False, 0, id="odd"),
        pytest.param((1, 2, 20, 71, 100, 128), 33, True, 50, id="wide"),
        pytest.param((1, 1, 40, 12, 16, 8), 4, False, 0, id="few-keys"),
    ],
)
def test_neighbours_equal_plain_operations_with_gradients(sizes, window, causal, before):
    batch, heads, queries, keys, dim, values = sizes
    rows = (batch, heads)
    tensors = [torch.randn(*rows, queries, dim), torch.randn(batch, keys, heads, dim).transpose(1, 2)]
    tensors += [torch.randn(*rows, keys, values), None, None, None, None]
    if window % 2:
        tensors[3:] = [torch.randn(1, heads, keys), torch.rand(heads), torch.randn(*rows, queries, values)]
        tensors += [torch.randn(*rows, queries)]
    layout = near.Layout(window, 0 if causal else window, before)
    found = []
    for attend, dtype in ((near.attend_plainly, torch.float64), (near.attend, torch.float32)):
        given = [None if x is None else x.to(dtype).requires_grad_() for x in tensors]
        kernels = [near.near_kernels()] if attend is near.attend else []
        results = attend(given, None, layout, *kernels)
        some = results[1] > -torch.inf
        weights = [torch.cos(torch.arange(x.numel()).to(dtype)).view(x.shape) for x in results]
        total = (weights[0] * results[0]).sum() + (weights[1] * results[1])[some].sum()
        wanted = [x for x in given if x is not None]
        found.append([results[0], results[1][some], *torch.autograd.grad(total, wanted)])
    for index, (expected, actual) in enumerate(zip(*found, strict=True)):
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) < (1e-5 if index < 2 else 1e-4)


def test_an_attention_takes_the_kernels_for_its_neighbours(monkeypatch):
    checked, launched, forward = [], [], near.near_kernels().forward
    monkeypatch.setattr(self_check, "is_right", lambda *given: False)
    monkeypatch.setattr(self_check, "near_is_right", lambda device: checked.append(device) or True)
    monkeypatch.setattr(near.near_kernels(), "forward", lambda *given: launched.append(given) or forward(*given))
    attention = klformer.build_attention("generative-prf", num_heads=2, head_dim=8, num_frequencies=4, window=2)
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    found = attention(q, k, v)
    assert launched
    assert checked == [CPU]
    with klformer.use_backend("chunked"):
        expected = attention(q, k, v)
    assert len(launched) == 1
    assert relative_error(found, expected) < 1e-5
    monkeypatch.setattr(self_check, "near_is_right", lambda device: False)
    attention(q, k, v)
    assert len(launched) == 1


@pytest.mark.parametrize("feature_map", ["prf", "rks"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_that_of_the_product_in_chunks(dtype, feature_map):
    given = {"simplex": True} if feature_map == "prf" else {"smoothing": torch.ones(1)}
    q, k, v = (torch.randn(1, 2, 40, size).to(dtype) for size in (8, 8, 6))
    frequencies = torch.randn(2, 20, 8)

    def found(backend, precision):
        tensors = [x.to(precision).requires_grad_() for x in (q, k, v)]
        omega = frequencies.to(torch.float64 if precision == torch.float64 else torch.float32).requires_grad_()
        out, _ = op.attend(
            SpectralKernel(FEATURE_MAPS[feature_map], omega, **given), *tensors, causal=True, backend=backend
        )
        assert out.dtype == precision
        weights = torch.cos(torch.arange(out.numel())).view(out.shape).to(dtype).to(precision)
        return [out, *torch.autograd.grad(out, (*tensors, omega), weights)]

    # The interpreter cuts off where a GPU rounds to bfloat16.
    factor = 3 if dtype == torch.bfloat16 else 1.2
    for expected, actual, chunked in zip(
        found("reference", torch.float64), found("triton", dtype), found("chunked", dtype), strict=True
    ):
        assert relative_error(actual, expected) < factor * relative_error(chunked, expected) + 1e-4


@pytest.fixture
def accesses(monkeypatch):
    """Checks that every load and store of a kernel stays in the memory of one tensor; how many there were."""
    memory, counted = [], [0]
    launch = sys.modules[Launcher.__module__].launch

    def launched(kernel, grid, *given, **constants):
        storages = [x.untyped_storage() for x in given if isinstance(x, torch.Tensor)]
        memory[:] = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
        launch(kernel, grid, *given, **constants)

    def check(pointers, mask):
        active = pointers.data[mask.data]
        if active.size:
            first, last = int(active.min()), int(active.max())
            assert any(start <= first and last < stop for start, stop in memory), "outside of all tensors"
            counted[0] += 1

    def guarded(usual, mask):
        return lambda self, *given: check(given[0], given[mask]) or usual(self, *given)

    for name, mask in (("create_masked_load", 1), ("create_masked_store", 2)):
        monkeypatch.setattr(InterpreterBuilder, name, guarded(getattr(InterpreterBuilder, name), mask))
    for module in (prf_calls, rks_calls, near_calls, sys.modules[Launcher.__module__]):
        monkeypatch.setattr(module, "launch", launched)
    return counted


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", ["prf", "rks"])
def test_nothing_is_read_or_written_outside_of_tensors(feature_map, causal, accesses):
    given = {"simplex": True} if feature_map == "prf" else {"smoothing": torch.ones(2), "pair_offset": torch.ones(2, 7)}
    tensors = [torch.randn(1, 2, 19, size, requires_grad=True) for size in (7, 7, 5)]
    omega = torch.randn(2, 9, 7, requires_grad=True)
    kernel = SpectralKernel(FEATURE_MAPS[feature_map], omega, frequency_bias=torch.randn(1, 9), **given)
    out, log_sum = op.attend(kernel, *tensors, causal=causal, backend="triton")
    (out.sum() + log_sum.sum()).backward()
    assert accesses[0] > 100


def test_neighbours_are_not_read_outside_of_tensors(accesses):
    q, k, v = (torch.randn(1, 2, 19, size, requires_grad=True) for size in (7, 7, 5))
    kept = torch.ones(1, 1, 19, dtype=torch.bool)
    operands = [q, k, v, torch.randn(1, 2, 19), torch.ones(2), torch.randn(1, 2, 19, 5), torch.randn(1, 2, 19)]
    out, _ = near.attend(operands, kept, near.Layout(4, 4, 0), near.near_kernels())
    out.sum().backward()
    assert accesses[0] > 20


def test_calls_that_it_does_not_serve_have_a_reason(monkeypatch):
    backend = BACKENDS["triton"]

    def reason(feature_map="prf", dim=8, length=5, dtype=torch.float32):
        q = torch.randn(1, 2, length, dim, dtype=dtype)
        needs = FEATURE_MAPS[feature_map].needs_frequencies
        kernel = SpectralKernel(FEATURE_MAPS[feature_map], torch.randn(2, 4, dim) if needs else None)
        return backend.supports(Call("product", kernel, q=q, k=q, v=q))

    assert reason() is None
    assert reason("elu") == "feature_map 'elu' has no kernels"
    assert reason(dim=129) == "heads are wider than 128"
    assert reason(length=0) == "there are no tokens"
    assert reason(dtype=torch.float64) == "it computes in float32, not in torch.float64"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert reason() == "it is for GPUs, not for cpu"


@pytest.mark.parametrize(
    ("product", "ours", "theirs"),
    [
        ("prf causal", "states attend states gradients gradients", 1),
        ("prf causal weighted", "envelope states attend states gradients gradients", 1),
        ("rks causal", "sums attend sums gradients gradients", 1),
        ("rks", "sums attend gradients gradients", 0),
    ],
)
def test_forward_and_backward_are_few_launches(monkeypatch, product, ours, theirs):
    """16,384 tokens, on tensors without memory: our kernels, and those of torch that add up over chunks."""
    launched = []
    for module in (prf_calls, rks_calls, sys.modules[Launcher.__module__]):
        monkeypatch.setattr(module, "launch", lambda kernel, *given, **_: launched.append(kernel.fn.__name__))
    q, k, v, d_out = (torch.empty(1, 8, 16384, 64, device="meta") for _ in range(4))
    kernel = SpectralKernel(FEATURE_MAPS[product[:3]], torch.empty(8, 128, 64, device="meta"))
    bias = torch.empty(1, 8, 16384, device="meta") if "weighted" in product else None
    backend = BACKENDS["triton"]
    with Launches() as counted:
        if "causal" in product:
            call = Call("causal", kernel, q=q, k=k, v=v, key_bias=bias)
            d_results = [d_out, None, None, None, None]
            backend.backward(call, backend.forward(call, keep=True), d_results, ("q", "k", "v", "omega"))
        else:
            absorb = Call("absorb", kernel, k=k, v=v)
            sums = backend.forward(absorb, keep=True)
            read = Call("read", kernel, q=q, sums=Sums(*sums))
            needed = ("q", "omega", "values", "weights")  # a log-scale counts as a constant
            d_read = backend.backward(read, backend.forward(read, keep=True), [d_out, None], needed)
            backend.backward(absorb, sums, [d_read["values"], d_read["weights"], None], ("k", "v", "omega"))
    assert " ".join(name.removesuffix("_kernel") for name in launched) == ours
    assert counted.by_name.total() == theirs, counted.by_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("step", ["absorb", "read", "causal"])
@pytest.mark.parametrize("feature_map", ["prf", "rks"])
def test_compiled_programs_know_what_is_kept(step, dtype, feature_map):
    q, k, v = torch.randn(3, 1, 2, 5, 8).to(dtype)
    given = {"simplex": True} if feature_map == "prf" else {"smoothing": torch.ones(1)}
    kernel = SpectralKernel(FEATURE_MAPS[feature_map], torch.randn(2, 4, 8), **given)
    call = Call("absorb", kernel, k=k, v=v)
    if step == "causal":
        call = Call("causal", kernel, q=q, k=k, v=v)
    elif step == "read":
        call = Call("read", kernel, q=q, sums=BACKENDS["triton"].absorb(call))
    backend = BACKENDS["triton"]
    expected = empty_results(call) + backend.empty_kept(call)
    found = backend.forward(call, keep=True)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
