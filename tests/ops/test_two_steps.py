"""Absorb, read and causal: every way to take attention apart gives the whole, with log-sums and gradients."""

import copy
import pickle
import random

import pytest
import torch
from parts_support import on_ranks
from support import relative_error

from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import KernelState, SpectralKernel, absorb, attend, causal, kept_keys, read
from klformer.ops.spectral_product.decoding import DecodingState
from klformer.ops.spectral_product.parts import PartProduct

BATCH, HEADS, LENGTH, DIM, VALUES, FREQUENCIES = 2, 3, 23, 5, 4, 9
#: Kernels by name: map, and what they have besides frequencies.
KERNELS = {
    "rks": ("rks", {"smoothing": 0.05}),
    "rks paired": ("rks", {"smoothing": 0.05, "paired": True}),
    "prf": ("prf", {"norm_coefficient": 0.3}),
    "prf simplex": ("prf", {"simplex": True}),
    "elu": ("elu", {}),
}
BACKENDS = ("chunked", "flash_cpu", "plain", "reference")


class Problem:
    """A kernel and sequences; all of their tensors want gradients."""

    def __init__(self, name, dtype, *, seed):
        feature_map, options = KERNELS[name]
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.qkv = [normal(BATCH, HEADS, LENGTH, size) for size in (DIM, DIM, VALUES)]
        self.key_bias = normal(BATCH, 1, LENGTH)
        self.key_mask = torch.rand(BATCH, LENGTH, generator=generator) > 0.2
        self.key_mask[:, 0] = True  # every query sees a key, also where it is causal
        given = {"norm_coefficient": options.get("norm_coefficient", 0.0), "simplex": options.get("simplex", False)}
        if feature_map != "elu":
            given |= {"omega": normal(HEADS, FREQUENCIES, DIM), "frequency_bias": normal(1, FREQUENCIES)}
        if options.get("paired"):
            given["pair_offset"] = normal(1, DIM)
        if "smoothing" in options:
            given["smoothing"] = torch.full((HEADS,), options["smoothing"], dtype=dtype, requires_grad=True)
        self.kernel = SpectralKernel(FEATURE_MAPS[feature_map], **given)
        self.inputs = [*self.qkv, self.key_bias, *self.kernel.tensors().values()]
        self.d_out = normal(BATCH, HEADS, LENGTH, VALUES).detach()
        self.d_log_sum = normal(BATCH, HEADS, LENGTH).detach()
        self.random = random.Random(seed)

    def whole(self, backend, *, is_causal=False):
        options = {"causal": is_causal, "backend": backend}
        mask = kept_keys(self.key_mask, self.key_bias)
        return attend(self.kernel, *self.qkv, key_mask=mask, key_bias=self.key_bias, **options)

    def keys(self, here):
        _, k, v = self.qkv
        return (k[:, :, here], v[:, :, here]), {
            "key_mask": self.key_mask[:, here],
            "key_bias": self.key_bias[:, :, here],
        }

    def queries(self, here):
        return self.qkv[0][:, :, here]

    def pieces(self):
        """Cuts at random places; some pieces may be empty."""
        ends = sorted(self.random.choices(range(LENGTH + 1), k=3))
        return [slice(start, stop) for start, stop in zip([0, *ends], [*ends, LENGTH], strict=True)]

    def gradients(self, out, log_sum):
        loss = (out * self.d_out).sum() + (log_sum * self.d_log_sum).sum()
        return torch.autograd.grad(loss, self.inputs, retain_graph=True)


def in_pieces(problem, backend):
    """Absorbed in random pieces, merged in random order, read in random pieces."""
    states = []
    for here in problem.pieces():
        keys, weights = problem.keys(here)
        states.append(absorb(problem.kernel, *keys, **weights, backend=backend))
    problem.random.shuffle(states)
    state = KernelState.merge(*states)
    results = [read(problem.kernel, problem.queries(here), state, backend=backend) for here in problem.pieces()]
    return [torch.cat(parts, 2) for parts in zip(*results, strict=True)]


def causal_in_pieces(problem, backend):
    results, state = [], None
    for here in problem.pieces():
        keys, weights = problem.keys(here)
        *result, state = causal(problem.kernel, problem.queries(here), *keys, state=state, **weights, backend=backend)
        results.append(result)
    return [torch.cat(parts, 2) for parts in zip(*results, strict=True)], state


def on_two_ranks(problem, backend, is_causal):
    parts = [slice(0, 9), slice(9, LENGTH)]

    def work(others):
        here = parts[others.index]
        (k, v), weights = problem.keys(here)
        mask = kept_keys(weights["key_mask"], weights["key_bias"])
        options = {"causal": is_causal, "parts": others, "backend": backend}
        product = PartProduct(problem.kernel, k, v, key_mask=mask, key_bias=weights["key_bias"], **options)
        return product.read(problem.queries(here))

    return [torch.cat(results, 2) for results in zip(*on_ranks(2, work), strict=True)]


def check(problem, found, wanted, *, exact):
    """Outputs, log-sums and all gradients."""
    pairs = [*zip(found, wanted, strict=True)]
    pairs += zip(problem.gradients(*found), problem.gradients(*wanted), strict=True)
    for number, (x, y) in enumerate(pairs):
        if exact:
            torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-10)
        else:
            assert relative_error(x, y) < (1e-5 if number < 2 else 2e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("seed", range(3))
def test_the_parts_are_the_whole(backend, name, dtype, seed):
    if backend == "flash_cpu" and not name.startswith("prf"):
        pytest.skip("flash is for exponential maps")
    problem, exact = Problem(name, dtype, seed=seed), dtype == torch.float64
    oracle = Problem(name, torch.float64, seed=seed)
    whole, wanted = problem.whole(backend), oracle.whole("reference")
    check(problem, in_pieces(problem, backend), whole, exact=exact)
    for x, y in zip([*whole, *problem.gradients(*whole)], [*wanted, *oracle.gradients(*wanted)], strict=True):
        assert relative_error(x, y) < (1e-10 if exact else 2e-4)
    check(problem, on_two_ranks(problem, backend, False), whole, exact=exact)
    if backend == "flash_cpu":
        return  # it has no causal form
    whole = problem.whole(backend, is_causal=True)
    (found, state), wanted = causal_in_pieces(problem, backend), oracle.whole("reference", is_causal=True)
    check(problem, found, whole, exact=exact)
    assert relative_error(whole[0], wanted[0]) < (1e-10 if exact else 1e-5)
    check(problem, read(problem.kernel, problem.qkv[0], state, backend=backend), problem.whole(backend), exact=exact)
    check(problem, on_two_ranks(problem, backend, True), whole, exact=exact)
    sizes = {"batch_size": BATCH, "num_heads": HEADS, "value_dim": VALUES}
    decoding = DecodingState(KernelState.empty(problem.kernel, like=problem.qkv[0], **sizes))
    steps = []
    for here in (slice(t, t + 1) for t in range(LENGTH)):
        (k, v), weights = problem.keys(here)
        if weights["key_mask"].all():
            steps.append(decoding.step(problem.queries(here), k, v, weights["key_bias"], backend=backend)[0])
        else:
            steps.append(decoding.absorb(k, v, **weights, backend=backend).read(problem.queries(here)))
    assert relative_error(torch.cat(steps, 2), whole[0]) < (1e-10 if exact else 1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_a_memory_that_is_read_twice_gets_both_gradients(name, tmp_path):
    problem = Problem(name, torch.float64, seed=0)
    (k, v), weights = problem.keys(slice(None))
    state = absorb(problem.kernel, k, v, **weights)
    first, second = (read(problem.kernel, q, state)[0] for q in (problem.qkv[0], 2 * problem.qkv[0]))
    found = torch.autograd.grad((first + second).sum(), problem.inputs)
    expected = torch.zeros(())
    for factor in (1, 2):
        qkv = [factor * problem.qkv[0], k, v]
        mask = kept_keys(weights["key_mask"], weights["key_bias"])
        expected = expected + attend(problem.kernel, *qkv, key_mask=mask, key_bias=weights["key_bias"])[0].sum()
    for x, y in zip(found, torch.autograd.grad(expected, problem.inputs), strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-10)
    # A state of a file is tensors that may want gradients, too; and a weight that is learned gets one.
    state.save(tmp_path / "state.safetensors")
    loaded = KernelState.load(tmp_path / "state.safetensors")
    values, log_weight = loaded.sums.values.requires_grad_(), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    both = KernelState.merge(loaded.weigh(log_weight), loaded)
    out = read(loaded.kernel, problem.qkv[0], both)[0]
    assert all(
        x.abs().sum() > 0 for x in torch.autograd.grad(out.square().sum(), [values, problem.qkv[0]], retain_graph=True)
    )
    doubled = read(loaded.kernel, problem.qkv[0], both)[1]
    (slope,) = torch.autograd.grad(doubled.sum(), log_weight)
    share = torch.tensor(0.5).exp() / (1 + torch.tensor(0.5).exp())
    torch.testing.assert_close(slope, share.double() * doubled.numel())


def test_states_of_other_kernels_are_refused():
    problem, other = Problem("prf", torch.float64, seed=0), Problem("prf", torch.float64, seed=1)
    (k, v), weights = problem.keys(slice(None))
    state = absorb(problem.kernel, k, v, **weights)
    with pytest.raises(ValueError, match="the state is of another kernel, or of another draw of its noise"):
        read(other.kernel, problem.qkv[0], state)
    with pytest.raises(ValueError, match="the state is of another kernel"):
        causal(other.kernel, *problem.qkv, state=state)
    with torch.no_grad():
        problem.kernel.omega.add_(0)
    with pytest.raises(ValueError, match="were changed after it had absorbed its keys"):
        state.read(problem.qkv[0])


def a_state(name="prf"):
    problem = Problem(name, torch.float64, seed=0)
    (k, v), weights = problem.keys(slice(None))
    with torch.no_grad():
        return problem, absorb(problem.kernel, k, v, **weights)


def test_states_share_no_memory():
    problem, state = a_state()
    q, k, v = (x.detach() for x in problem.qkv)
    others = [state.weigh(1.0), KernelState.merge(state), state.shift(state.reference + 1)]
    before = [other.read(q) for other in others]
    state.absorb_(2 * k, 3 * v)
    for other, result in zip(others, before, strict=True):
        assert torch.equal(other.read(q), result)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", ["prf", "rks", "elu"])
def test_copies_of_states_are_states(copied, name):
    problem, state = a_state(name)
    q, k, v = (x.detach() for x in problem.qkv)
    problem.kernel = None
    for original in (state, DecodingState(state)):
        other = copied(original)
        assert torch.equal(other.read(q), original.read(q))
    twin, own = copied(DecodingState(state)), DecodingState(state)
    for here in (slice(0, 1), slice(1, 2)):
        token = (q[:, :, here], k[:, :, here], v[:, :, here])
        assert torch.equal(twin.step(*token)[0], own.step(*token)[0])
    assert torch.equal(twin.read(q), own.read(q))


@pytest.mark.parametrize("name", ["rks", "elu"])
def test_keys_with_weights_between_steps(name):
    problem, state = a_state(name)
    q, k, v = (x.detach() for x in problem.qkv)
    tokens = [(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]) for t in range(3)]
    bias = torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    own = DecodingState(state)
    own.step(*tokens[0])
    own.absorb_(*tokens[1][1:], key_bias=bias)
    found, _ = own.step(*tokens[2])
    wanted = state.absorb(*tokens[0][1:]).absorb(*tokens[1][1:], key_bias=bias).absorb(*tokens[2][1:])
    torch.testing.assert_close(found, wanted.read(tokens[2][0]), atol=1e-10, rtol=1e-10)
    nothing = DecodingState(KernelState(state.kernel, type(state.sums)(*(x[:0] for x in state.sums))))
    assert nothing.step(*(x[:0] for x in tokens[0]))[0].shape == (0, HEADS, 1, VALUES)


def test_a_state_of_a_compiled_program_is_one():
    problem, _ = a_state()
    q, k, v = (x.detach() for x in problem.qkv)
    kernel = problem.kernel.with_tensors({name: x.detach() for name, x in problem.kernel.tensors().items()})
    torch._dynamo.reset()
    made = torch.compile(lambda k, v: absorb(kernel, k, v), backend="aot_eager")(k, v)
    torch.testing.assert_close(made.read(q), absorb(kernel, k, v).read(q), atol=1e-10, rtol=1e-10)
