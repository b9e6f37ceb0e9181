"""Every attention from its definition, through whole (L, S) matrices and plain loops, in the precision of its input."""

import torch
from torch import Tensor

from klformer.attention.base import AttentionMechanism
from klformer.attention.bigbird import BigBirdAttention
from klformer.attention.linformer import LinformerAttention
from klformer.attention.local import LocalAttention
from klformer.attention.longformer import LongformerAttention
from klformer.attention.reformer import ReformerAttention
from klformer.attention.sinkhorn import SinkhornAttention
from klformer.attention.softmax import SoftmaxAttention
from klformer.attention.sparse import SparseAttention
from klformer.attention.synthesizer import SynthesizerAttention
from klformer.ops.spectral_product import reference


def by_definition(
    mechanism: AttentionMechanism, q: Tensor, k: Tensor, v: Tensor, key_mask=None, causal=False
) -> Tensor:
    """(B, H, L, E) from q, k, v as `mechanism` takes them."""
    if key_mask is None:
        key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool)
    match mechanism:
        case LocalAttention() | LongformerAttention() | BigBirdAttention() | SparseAttention():
            return softmax_where(q, k, v, pattern(mechanism, q.shape[2], key_mask, causal), key_mask, causal)
        case SoftmaxAttention():
            everything = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
            return softmax_where(q, k, v, everything, key_mask, causal)
        case LinformerAttention():
            return linformer(mechanism, q, k, v, key_mask)
        case SynthesizerAttention():
            return dense(synthesizer_scores(mechanism, q), v, key_mask[:, None, None], causal)
        case SinkhornAttention():
            return sinkhorn(mechanism, q, k, v, key_mask, causal)
        case ReformerAttention():
            return reformer(mechanism, q, v, key_mask, causal)
        case _:
            kernel = mechanism.features(q, role="query") @ mechanism.features(k, role="key").transpose(-1, -2)
            visible = reference.visible_pairs(q.shape[2], k.shape[2], key_mask[:, None], causal)
            log_weights = torch.zeros(visible.shape, dtype=v.dtype).masked_fill(~visible, float("-inf"))
            own = getattr(mechanism, "kernel", None)
            smoothing = None if own is None else own._present_smoothing(v)
            smoothing = None if smoothing is None else smoothing.to(v.dtype)[:, None, None]
            return reference.attention_from_kernel(kernel, log_weights, v, smoothing)[0]


def dense(scores: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    """Softmax over the visible scores of every row; 0 where there are none."""
    visible = visible.expand(*v.shape[:2], *scores.shape[-2:])
    if causal:
        visible = visible & torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0)
    return weights @ v


def softmax_where(q, k, v, seen: Tensor, key_mask, causal) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return dense(scores, v, seen & key_mask[:, None, None], causal)


def pattern(mechanism: AttentionMechanism, length: int, key_mask: Tensor, causal: bool) -> Tensor:
    """Which key each query sees, broadcastable to (B, H, L, L), but for padding and the future."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    match mechanism:
        case LocalAttention(layout="blocks", block_size=b):
            return i // b == j // b
        case LocalAttention(layout="sliding", block_size=b):
            return (i // b - j // b).abs() <= 1
        case LocalAttention(layout="strided", block_size=b, max_len=longest):
            stride = -(-longest // b)
            return i % stride == j % stride
        case LongformerAttention(window=w, num_global=g):
            return ((i - j).abs() <= w // 2) | (j < g) | (i < g)
        case SparseAttention(pattern="fixed", block_size=b, num_summary=c):
            return (i // b == j // b) | (j % b >= b - c)
        case SparseAttention(pattern="strided", block_size=b):
            return ((i - j).abs() < b) | ((i - j) % b == 0)
        case BigBirdAttention():
            return bigbird_pattern(mechanism, length, key_mask, causal)
    raise AssertionError(mechanism)


def bigbird_pattern(mechanism: BigBirdAttention, length: int, key_mask: Tensor, causal: bool) -> Tensor:
    """Window and global blocks from the definition; the random ones are asked for, and tested on their own."""
    size, num_blocks = mechanism.block_size, -(-length // mechanism.block_size)
    seen = torch.zeros(key_mask.shape[0], mechanism.num_heads, length, length, dtype=torch.bool)
    i, j = torch.arange(length)[:, None] // size, torch.arange(length)[None] // size
    for b, row in enumerate(key_mask):
        last = max(row.nonzero().flatten().tolist(), default=0) // size
        ends = (0,) if causal else (0, last)
        chosen, wanted = mechanism.blocks_seen(num_blocks, torch.tensor([last]), causal)
        for h in range(mechanism.num_heads):
            seen[b, h] = (i - j).abs() <= mechanism.reach
            for end in ends:
                seen[b, h] |= (i == end) | (j == end)
            for n in range(num_blocks):
                for block in chosen[0, n, h][wanted[0, n, h]].tolist():
                    seen[b, h][n * size : (n + 1) * size, block * size : (block + 1) * size] = True
    return seen


def linformer(mechanism: LinformerAttention, q, k, v, key_mask) -> Tensor:
    length = k.shape[2]
    for_keys = mechanism.key_projection
    for_values = for_keys if mechanism.value_projection is None else mechanism.value_projection
    there = key_mask[:, None, :, None]
    rows_k = torch.einsum("sr,bhsd->bhrd", for_keys[:length], torch.where(there, k, 0))
    rows_v = torch.einsum("sr,bhse->bhre", for_values[:length], torch.where(there, v, 0))
    return (q @ rows_k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ rows_v


def synthesizer_scores(mechanism: SynthesizerAttention, q: Tensor) -> Tensor:
    length, scores = q.shape[2], mechanism.scores
    if mechanism.variant == "random":
        return scores.table[:, :length, :length]
    if mechanism.variant == "factorised-random":
        return torch.einsum("hir,hjr->hij", scores.left, scores.right)[:, :length, :length]
    if mechanism.variant == "dense":
        return network(scores, q)[..., :length]
    outer, inner = network(scores.outer, q), network(scores.inner, q)
    places = torch.arange(length)
    return outer[..., places // scores.inner_size] * inner[..., places % scores.inner_size]


def network(scores, q: Tensor) -> Tensor:
    hidden = torch.einsum("bhld,hdn->bhln", q, scores.hidden) + scores.hidden_bias
    return torch.einsum("bhln,hnm->bhlm", hidden.relu(), scores.out) + scores.out_bias


def sinkhorn(mechanism: SinkhornAttention, q, k, v, key_mask, causal) -> Tensor:
    """Block by block, with a matching normalised without logarithms."""
    batch, heads, length, _ = q.shape
    size = mechanism.block_size
    blocks = [range(start, min(start + size, length)) for start in range(0, length, size)]
    out = torch.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            kept = [[t for t in block if key_mask[b, t]] for block in blocks]
            matching = sinkhorn_matching(mechanism, k[b, h], kept, h, causal)
            for n, block in enumerate(blocks):
                for t in block:
                    keys, values = [], []
                    for s in kept[n]:
                        if not causal or s <= t:
                            keys.append(k[b, h, s])
                            values.append(v[b, h, s])
                    for place in range(size):
                        sources = [(matching[n, m], m * size + place) for m in range(len(blocks))]
                        sources = [(w, s) for w, s in sources if w > 0 and s < length and key_mask[b, s]]
                        if sources:
                            total = sum(w for w, _ in sources) / matching[n].sum()
                            keys.append(sum(w * k[b, h, s] for w, s in sources) / total)
                            values.append(sum(w * v[b, h, s] for w, s in sources) / total)
                    if keys:
                        weights = (torch.stack(keys) @ q[b, h, t] / q.shape[-1] ** 0.5).softmax(0)
                        out[b, h, t] = weights @ torch.stack(values)
    return out


def sinkhorn_matching(
    mechanism: SinkhornAttention, k: Tensor, kept: list[list[int]], head: int, causal: bool
) -> Tensor:
    """R (N, N) of one head."""
    num_blocks = len(kept)
    p = torch.zeros(num_blocks, num_blocks, dtype=k.dtype)
    for m, tokens in enumerate(kept):
        if tokens:
            pooled = k[tokens].sum(0)
            logits = pooled @ mechanism.sort_weight[head] + mechanism.sort_bias[head, 0]
            for n in range(num_blocks):
                if kept[n] and (not causal or m < n):
                    p[n, m] = (logits[n] / mechanism.temperature).exp()
    for _ in range(mechanism.iterations):
        p = p / p.sum(1, keepdim=True).clamp(min=1e-300)
        total = p.cumsum(0) if causal else p.sum(0, keepdim=True)
        p = p / total.clamp(min=1e-300)
    return p


def reformer(mechanism: ReformerAttention, q, v, key_mask, causal) -> Tensor:
    """Who sees whom, token by token; then one softmax over the union of the rounds."""
    batch, heads, length, head_dim = q.shape
    seen = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for rotations in mechanism.rotations[:, h]:
                members: dict[int, list[int]] = {}
                for t in range(length):
                    if key_mask[b, t]:
                        projected = (q[b, h, t] @ rotations).tolist()
                        both = projected + [-x for x in projected]
                        bucket = both.index(max(both)) if both else 0
                        members.setdefault(bucket, []).append(t)
                for tokens in members.values():
                    for rank_i, i in enumerate(tokens):
                        for rank_j, j in enumerate(tokens):
                            chunks_back = rank_i // mechanism.chunk_size - rank_j // mechanism.chunk_size
                            if chunks_back in (0, 1) and (not causal or j <= i):
                                seen[b, h, i, j] = True
    only_others = seen & ~torch.eye(length, dtype=torch.bool)
    seen = torch.where(only_others.any(-1, keepdim=True), only_others, seen)
    norms = (q.square().sum(-1, keepdim=True) + 1e-6 * head_dim).sqrt()
    scores = torch.einsum("bhid,bhjd->bhij", q, q / norms)
    return dense(scores, v, seen, causal)
