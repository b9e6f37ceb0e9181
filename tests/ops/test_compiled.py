"""Products in compiled programs: every derivative, and every length with one program."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.autograd import forward_ad

import klformer
from klformer.ops.envelopes import simplex_envelope
from klformer.ops.near import near_attention


@pytest.fixture(autouse=True)
def _no_program_of_before():
    torch._dynamo.reset()
    counters.clear()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def operands(length, *, dtype=torch.float64):
    return [torch.randn(2, 2, length, 4, dtype=dtype) for _ in range(3)]


def dual(function, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


DERIVATIVES = {
    "jvp": lambda f, q, t: torch.func.jvp(f, (q,), (t,))[1],
    "dual numbers": dual,
    "vjp": lambda f, q, t: torch.func.vjp(f, q)[1](t)[0],
    "grad": lambda f, q, t: torch.func.grad(lambda x: f(x).square().sum())(q),
    "vmap": lambda f, q, t: torch.func.vmap(f)(torch.stack([q, t])),
    "jacrev": lambda f, q, t: torch.func.jacrev(lambda x: f(x).sum((0, 1, 2)))(q),
    "jacfwd": lambda f, q, t: torch.func.jacfwd(lambda x: f(x).sum((0, 1, 2)))(q),
}
OMEGA = torch.randn(2, 8, 4, dtype=torch.float64)
FUNCTIONS = {
    "prf": lambda q, k, v: klformer.spectral_product(q, k, v, OMEGA, feature_map="prf"),
    "causal rks": lambda q, k, v: klformer.spectral_product(q, k, v, OMEGA, feature_map="rks", causal=True),
    "near": lambda q, k, v: near_attention(q, k, v, window=2)[0],
    "simplex": lambda q, k, v: simplex_envelope(q, OMEGA).unsqueeze(-1).expand(q.shape),
}


#: Programs take seconds to make.
CASES = [("prf", derivative) for derivative in DERIVATIVES]
CASES += [(function, derivative) for function in FUNCTIONS if function != "prf" for derivative in ("jvp", "grad")]


@pytest.mark.parametrize(("function", "derivative"), CASES)
def test_derivatives_in_a_compiled_program(function, derivative):
    q, k, v = operands(6)
    tangent = torch.randn_like(q)

    def found(x):
        return DERIVATIVES[derivative](lambda x: FUNCTIONS[function](x, k, v), x, tangent)

    expected = found(q)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(compiled(found)(q), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("derivative", ["dual numbers", "grad"])
def test_derivatives_of_a_compiled_program(derivative):
    """It was compiled for its results only, and is called again within a transform."""
    q, k, v = operands(6)
    tangent = torch.randn_like(q)

    def product(x):
        return FUNCTIONS["prf"](x, k, v)

    program = torch.compile(product, backend="aot_eager")
    program(q)
    expected = DERIVATIVES[derivative](product, q, tangent)
    torch.testing.assert_close(DERIVATIVES[derivative](program, q, tangent), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("function", ["prf", "causal rks"])
def test_one_program_serves_all_lengths(function):
    program = compiled(FUNCTIONS[function], dynamic=True)
    for length in (9, 40, 129):
        leaves = [x.requires_grad_() for x in operands(length)]
        found, expected = (f(*leaves) for f in (program, FUNCTIONS[function]))
        d_out = torch.randn_like(found)
        gradients = (torch.autograd.grad(x, leaves, d_out) for x in (found, expected))
        for x, y in zip((found, *next(gradients)), (expected, *next(gradients)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)
    assert counters["stats"]["unique_graphs"] == 1
