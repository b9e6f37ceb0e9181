"""Memory that is kept from call to call: results do not depend on what it holds, nor on who used it before."""

import threading

import pytest
import torch

from klformer.ops.spectral_product import spectral_product
from klformer.ops.spectral_product.chunked import memory


@pytest.fixture(autouse=True)
def kept_blocks():
    """Tests have torch fill what is uninitialised, in which case nothing is kept; here it is."""
    torch.use_deterministic_algorithms(False)
    memory._kept.blocks.clear()
    yield
    memory._kept.blocks.clear()
    torch.use_deterministic_algorithms(True)


def results(feature_map, causal, length=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, length, 8, generator=generator).requires_grad_() for _ in range(3))
    omega = torch.randn(3, 16, 8, generator=generator).requires_grad_()
    out = spectral_product(q, k, v, omega, feature_map=feature_map, causal=causal)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, omega))]


def assert_equal(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)


CALLS = [(feature_map, causal) for feature_map in ("prf", "rks") for causal in (False, True)]


@pytest.mark.parametrize(("feature_map", "causal"), CALLS)
def test_what_memory_holds_does_not_matter(feature_map, causal):
    wanted = results(feature_map, causal)
    assert memory._kept.blocks
    for block, _ in memory._kept.blocks.values():
        block.fill_(torch.nan)
    results(feature_map, causal, length=77, seed=1)
    assert_equal(results(feature_map, causal), wanted)


def test_memory_is_made_once():
    results("rks", True)
    blocks = {use: block.data_ptr() for use, (block, _) in memory._kept.blocks.items()}
    results("rks", True, seed=1)
    results("rks", True, length=100)
    assert {use: block.data_ptr() for use, (block, _) in memory._kept.blocks.items()} == blocks


def test_memory_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        q = torch.randn(1, 2, 50, 8)
        spectral_product(q, q, q, torch.randn(2, 16, 8), feature_map="rks")
    assert_equal(results("rks", False, length=50), results("rks", False, length=50))


def test_large_blocks_are_not_kept(monkeypatch):
    monkeypatch.setattr(memory, "MAX_KEPT_BYTES", 1000)
    wanted = results("prf", True)
    assert all(block.numel() * block.element_size() <= 1000 for block, _ in memory._kept.blocks.values())
    monkeypatch.undo()
    assert_equal(results("prf", True), wanted)


def test_threads_have_memory_of_their_own():
    wanted = [results("rks", True, seed=seed) for seed in range(4)]
    found = [[] for _ in wanted]

    def work(seed):
        for _ in range(5):
            found[seed].append(results("rks", True, seed=seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, expected in enumerate(wanted):
        assert len(found[seed]) == 5
        for got in found[seed]:
            assert_equal(got, expected)
