"""The attentions that are not kernels: variants against definitions, what each is known for, and how they grow."""

from itertools import pairwise

import pytest
import torch
from oracles import by_definition
from support import BATCH, HEAD_DIM, HEADS, MAX_LEN, VALUE_DIM, build, half_masked, operands, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

import klformer
from klformer.attention import sparse
from klformer.attention.bigbird import last_block
from klformer.ops.hashing import hashed_uniform
from klformer.ops.sinkhorn import log_sinkhorn
from klformer.ops.softmax_attention import merge, softmax_weights

VARIANTS = [
    ("local", {"block_size": 3, "layout": "blocks"}),
    ("local", {"block_size": 3, "layout": "sliding"}),
    ("local", {"block_size": MAX_LEN // 3, "layout": "strided"}),
    ("local", {"block_size": 100}),
    ("longformer", {"window": 2, "num_global": 0}),
    ("longformer", {"window": 8, "num_global": 5}),
    ("longformer", {"window": 512}),
    ("bigbird", {"block_size": 3, "window_blocks": 1, "random_blocks": 2}),
    ("bigbird", {"block_size": 1, "window_blocks": 5, "random_blocks": 3}),
    ("bigbird", {"block_size": 5, "random_blocks": 0}),
    ("bigbird", {}),
    ("sparse", {"block_size": 5, "num_summary": 5}),
    ("sparse", {"block_size": 3, "num_summary": 1, "pattern": "strided"}),
    ("sparse", {"block_size": 50, "num_summary": 10}),
    ("linformer", {"rank": 3, "share_kv": False}),
    ("reformer", {"num_buckets": 4, "chunk_size": 3, "num_rounds": 1}),
    ("reformer", {"num_buckets": 2, "chunk_size": 1, "num_rounds": 3}),
    ("sinkhorn", {"block_size": 3, "iterations": 5, "temperature": 0.5}),
    ("sinkhorn", {"block_size": 50, "iterations": 1}),
    ("synthesizer", {"variant": "random"}),
    ("synthesizer", {"variant": "dense"}),
    ("synthesizer", {"variant": "factorised-dense"}),
]


def both_directions(variants):
    """(name, options, causal) for what has a causal form, and without for all."""
    directions = [(name, options, False) for name, options in variants]
    directions += [(name, options, True) for name, options in variants if build(name, **options).supports_causal]
    ids = [
        "-".join([name, *map(str, options.values()), *(["causal"] if causal else [])])
        for name, options, causal in directions
    ]
    return pytest.mark.parametrize(("name", "options", "causal"), directions, ids=ids)


@both_directions(VARIANTS)
@pytest.mark.parametrize("length", [1, 7, 24, 31])
def test_variants_equal_their_definitions(name, options, causal, length):
    mechanism = build(name, **options)
    x = operands(queries=length, own_keys=True)
    key_mask = half_masked(keys=length)
    key_mask[:, 0] = True
    for mask in (None, key_mask):
        expected = by_definition(mechanism, *x, key_mask=mask, causal=causal)
        actual = mechanism(*x, key_mask=mask, causal=causal)
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@both_directions(VARIANTS)
def test_gradients_of_variants(name, options, causal):
    mechanism = build(name, **options)
    x = operands(batch=2, queries=7, own_keys=True).require_grad()
    key_mask = half_masked(keys=7)

    def attend(*inputs):
        return mechanism(*inputs[:3], key_mask=key_mask, causal=causal)

    assert torch.autograd.gradcheck(attend, (*x, *mechanism.parameters()), atol=1e-6, fast_mode=True)


@both_directions(VARIANTS)
def test_padding_at_the_end_changes_nothing(name, options, causal):
    mechanism = build(name, **options)
    length, padding = 13, 17
    x = operands(queries=length, own_keys=True)
    longer = [torch.cat([t, torch.randn(*t.shape[:2], padding, t.shape[3], dtype=t.dtype)], dim=2) for t in x]
    key_mask = (torch.arange(length + padding) < length).expand(BATCH, -1)
    padded = mechanism(*longer, key_mask=key_mask, causal=causal)[:, :, :length]
    torch.testing.assert_close(padded, mechanism(*x, causal=causal), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local", {"layout": "diagonal"}, "layout must be one of 'blocks', 'sliding', 'strided', got 'diagonal'"),
        ("local", {"block_size": 0}, "block_size must be at least 1, got 0"),
        ("longformer", {"window": 7}, "window must be even, half of it on either side of a token, got 7"),
        ("bigbird", {"window_blocks": 2}, "window_blocks must be odd"),
        ("sparse", {"num_summary": 51, "block_size": 50}, "num_summary must be at most block_size=50, got 51"),
        ("sparse", {"pattern": "random"}, "pattern must be one of 'fixed', 'strided', got 'random'"),
        ("reformer", {"num_buckets": 5}, "num_buckets must be even"),
        ("sinkhorn", {"temperature": 0.0}, "temperature must be finite and above 0"),
        ("synthesizer", {"variant": "sparse"}, "variant must be one of"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        klformer.build_attention(name, num_heads=2, head_dim=4, max_len=16, **options)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives, forward or backward."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


SPARSE = ("local", "longformer", "bigbird", "linformer", "reformer", "sinkhorn", "sparse")


@both_directions([(name, {}) for name in SPARSE])
def test_nothing_grows_faster_than_the_sequence(name, options, causal, monkeypatch):
    """With the settings of Long Range Arena. Sparse computes its many scores in pieces, which are made small here."""
    monkeypatch.setattr(sparse, "SCORES_AT_ONCE", 2**16)
    largest = {}
    for length in (1024, 4096):
        mechanism = klformer.build_attention(name, num_heads=1, head_dim=8, max_len=4096, **options)
        q, k, v = torch.randn(3, 1, 1, length, 8).requires_grad_().unbind(0)
        with LargestTensor() as found:
            mechanism(q, k, v, causal=causal).sum().backward()
        largest[length] = found.numel
    assert largest[4096] < 4.6 * largest[1024]
    assert largest[4096] < 4096**2 / 2


def test_a_strided_block_is_every_nth_token():
    mechanism = klformer.build_attention(
        "local", num_heads=HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, max_len=12, block_size=4, layout="strided"
    ).double()
    x = operands(queries=12, own_keys=True)
    x.v[:, :, 1] += 100
    moved = (mechanism(*x) > 5).any(-1).any(1)
    assert moved[0].nonzero().flatten().tolist() == [1, 4, 7, 10]
    with pytest.raises(ValueError, match="layout='strided' needs max_len"):
        klformer.build_attention("local", num_heads=1, head_dim=4, layout="strided")


class TestBigBird:
    def seen(self, num_blocks=20, last=None, causal=False, heads=HEADS):
        mechanism = klformer.build_attention("bigbird", num_heads=heads, head_dim=4, block_size=4)
        last = torch.tensor([num_blocks - 1 if last is None else last])
        chosen, wanted = mechanism.blocks_seen(num_blocks, last, causal)
        return [[sorted(chosen[0, n, h][wanted[0, n, h]].tolist()) for h in range(heads)] for n in range(num_blocks)]

    def test_three_random_blocks_beside_window_and_ends(self):
        for n, by_head in enumerate(self.seen()):
            fixed = {0, 19} | {b for b in (n - 1, n, n + 1) if 0 <= b < 20}
            for blocks in by_head:
                assert len(blocks) == len(set(blocks)) == len(fixed) + 3
                assert fixed <= set(blocks) <= set(range(20))
        assert any(by_head[0] != by_head[1] for by_head in self.seen()), "heads have their own"

    def test_random_blocks_of_the_past_only(self):
        for n, by_head in enumerate(self.seen(causal=True)):
            for blocks in by_head:
                fixed = {0, n} | ({n - 1} if n else set())
                assert fixed <= set(blocks) <= set(range(n + 1))
                assert len(blocks) == min(n + 1, len(fixed) + 3)

    def test_with_too_few_blocks_all_are_seen(self):
        assert self.seen(num_blocks=5) == [[[0, 1, 2, 3, 4]] * HEADS] * 5

    def test_all_blocks_are_equally_likely(self):
        counts = torch.zeros(40)
        for _ in range(40):
            for blocks in self.seen(num_blocks=40, heads=8)[20]:
                counts[[b for b in blocks if b not in (0, 19, 20, 21, 39)]] += 1
        drawn = counts[[b for b in range(40) if b not in (0, 19, 20, 21, 39)]]
        expected = 40 * 8 * 3 / 35
        assert drawn.sum() == 40 * 8 * 3
        # chi-square with 34 degrees of freedom: its mean is 34, its deviation 8
        assert ((drawn - expected) ** 2 / expected).sum() < 34 + 5 * 8

    def test_layers_differ_and_a_state_dict_says_how(self):
        one, other = (klformer.build_attention("bigbird", num_heads=2, head_dim=4, block_size=2) for _ in range(2))
        x = [torch.randn(1, 2, 60, 4) for _ in range(3)]
        assert not torch.allclose(one(*x), other(*x))
        other.load_state_dict(one.state_dict())
        assert torch.equal(one(*x), other(*x))

    def test_the_last_block_is_the_last_that_holds_keys(self):
        there = torch.zeros(3, 4, 1, 1, 2, dtype=torch.bool)
        there[0, :, ..., 0] = True
        there[1, :2] = True
        assert last_block(there).tolist() == [3, 1, 0]


class TestReformer:
    def test_one_bucket_is_full_attention_with_shared_queries_and_keys(self):
        mechanism = build("reformer", num_buckets=1, chunk_size=64, num_rounds=1)
        x = operands(queries=40, own_keys=True)
        keys = torch.nn.functional.normalize(x.q, dim=-1)
        scores = (x.q @ keys.transpose(-1, -2)).masked_fill(torch.eye(40, dtype=torch.bool), float("-inf"))
        # Nearly: the norm of a key has a small constant against a division by 0.
        torch.testing.assert_close(mechanism(*x), scores.softmax(-1) @ x.v, atol=1e-5, rtol=1e-5)

    def test_tokens_see_those_in_their_direction(self):
        """Clusters of directions: nearly all the weight goes to a token's own cluster, by the hash alone."""
        torch.manual_seed(0)
        mechanism = klformer.build_attention("reformer", num_heads=1, head_dim=16, num_buckets=32, chunk_size=32)
        centres = torch.nn.functional.normalize(torch.randn(8, 16), dim=-1)
        cluster = torch.arange(256) % 8
        # So short that a softmax over all keys would be nearly uniform.
        q = 0.1 * torch.nn.functional.normalize(centres[cluster] + 0.02 * torch.randn(256, 16), dim=-1)
        v = torch.nn.functional.one_hot(cluster, 16).float()
        weight_of_own = mechanism(q[None, None], q[None, None], v[None, None])[0, 0].gather(1, cluster[:, None])
        assert weight_of_own.mean() > 0.6
        full = build("softmax", dtype=torch.float32).attend(
            q[None, None], q[None, None], v[None, None], key_mask=None, causal=False
        )
        assert full[0, 0].gather(1, cluster[:, None]).mean() < 0.2

    def test_a_query_of_zero_has_a_gradient(self):
        mechanism = build("reformer", dtype=torch.float32, num_buckets=1, chunk_size=64, num_rounds=1)
        x = operands(dtype=torch.float32, queries=16, own_keys=True)
        x.q[:, :, 5] = 0
        x.require_grad()
        mechanism(*x).square().sum().backward()
        assert x.q.grad.abs().max() < 1e5

    def test_more_rounds_see_more(self):
        q = torch.randn(1, 1, 200, 8)
        v = torch.eye(200)[None, None]
        seen = []
        for rounds in (1, 2, 4):
            torch.manual_seed(1)
            sizes = {"num_heads": 1, "head_dim": 8, "value_dim": 200}
            mechanism = klformer.build_attention("reformer", **sizes, chunk_size=4, num_rounds=rounds)
            out = mechanism(q, q, v)
            torch.testing.assert_close(out.sum(-1), torch.ones(1, 1, 200))
            seen.append((out > 0).sum().item())
        assert seen[0] < seen[1] < seen[2]


class TestSinkhorn:
    @pytest.mark.parametrize("size", [1, 3, 12])
    def test_the_matching_becomes_doubly_stochastic(self, size):
        logits = 3 * torch.randn(2, size, size, dtype=torch.float64)
        everything = torch.ones(size, size, dtype=torch.bool)
        errors = []
        for iterations in (1, 4, 64, 1024):
            p = log_sinkhorn(logits, everything, iterations=iterations).exp()
            assert (p >= 0).all()
            torch.testing.assert_close(p.sum(-2), torch.ones(2, size, dtype=torch.float64))
            errors.append((p.sum(-1) - 1).abs().max().item())
        assert errors[-1] < 1e-6
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(errors))

    def test_a_low_temperature_gives_a_permutation(self):
        logits = torch.randn(5, 5, dtype=torch.float64)
        p = log_sinkhorn(logits / 0.01, torch.ones(5, 5, dtype=torch.bool), iterations=500).exp()
        assert p.max(-1).values.min() > 0.99

    def test_what_is_not_allowed_is_zero(self):
        allowed = torch.rand(6, 6) > 0.5
        allowed[2], allowed[:, 4] = False, False
        p = log_sinkhorn(torch.randn(6, 6), allowed, iterations=3).exp()
        assert p[~allowed].eq(0).all()
        assert p.isfinite().all()


class TestOps:
    def test_merged_parts_are_one_softmax(self):
        scores, v = torch.randn(4, 9, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
        visible = torch.rand(4, 9) > 0.4
        visible[0], visible[1, :5] = False, False
        visible[1, 5:] = True
        whole, _ = softmax_weights(scores, visible)
        parts = [softmax_weights(scores[:, s], visible[:, s]) for s in (slice(0, 5), slice(5, 9))]
        outs = torch.stack([parts[0][0] @ v[:5], parts[1][0] @ v[5:]])
        torch.testing.assert_close(merge(outs, torch.stack([n for _, n in parts])), whole @ v)
        assert whole[0].eq(0).all()

    def test_hashed_numbers_are_uniform_and_independent(self):
        u = hashed_uniform(torch.tensor(7), torch.arange(300).view(-1, 1), torch.arange(300))
        assert u.min() >= 0
        assert u.max() < 1
        # 90,000 numbers: standard errors of the mean, the variance and the correlations
        assert abs(u.mean() - 0.5) < 5 * 12**-0.5 / 300
        assert abs(u.var() - 1 / 12) < 5 * (1 / 180) ** 0.5 / 300
        for shifted in (u.roll(1, 0), u.roll(1, 1), u.T):
            assert abs(torch.corrcoef(torch.stack([u.flatten(), shifted.flatten()]))[0, 1]) < 5 / 300
        assert u.unique().numel() > 0.99 * u.numel()

    def test_hashed_numbers_do_not_depend_on_what_else_is_asked(self):
        seed = torch.tensor(3)
        few = hashed_uniform(seed, torch.arange(5), 2)
        assert torch.equal(hashed_uniform(seed, torch.arange(50), 2)[:5], few)
        assert not torch.equal(hashed_uniform(torch.tensor(4), torch.arange(5), 2), few)


def test_linformer_with_as_many_rows_as_tokens_can_be_softmax_attention():
    mechanism = build("linformer", rank=11)
    x = operands(queries=11, own_keys=True)
    with torch.no_grad():
        mechanism.key_projection[:11] = torch.eye(11)
    assert relative_error(mechanism(*x), build("softmax")(*x)) < 1e-12


def test_synthesizer_does_not_look_at_queries_and_keys():
    mechanism, x, y = build("synthesizer"), operands(own_keys=True), operands(own_keys=True)
    assert mechanism(*x).shape == (BATCH, HEADS, x.q.shape[2], VALUE_DIM)
    assert torch.equal(mechanism(*x), mechanism(y.q, y.k, x.v))
