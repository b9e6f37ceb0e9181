"""Exact attention of every query to its neighbours, with its log-sum, in time and memory linear in the length.

    out_i = sum_j p_ij v_j    p_ij = exp(q_i.k_j + b_j - log_sum_i)    log_sum_i = log sum_j exp(q_i.k_j + b_j)

over the keys at a distance of at most w; if causal over the w before and the query's own. Queries come scaled. The
log-sum makes results over disjoint sets of keys, or over the same with other kernels, one (`merge_results`).

Blocks of queries meet the keys in their reach: (block, block + 2 w) scores under a band. All blocks lie at one distance
in memory, those of a row behind each other, so that many of them are one matrix product; those at the end of a row see
padding only. Scores are made again in backward. They are to base 2, which costs a third of an exponential.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from klformer.checks import check_count
from klformer.ops.precision import full_precision
from klformer.ops.shapes import check_key_bias, check_key_mask, check_operands
from klformer.ops.spectral_product.chunked.memory import borrow
from klformer.ops.spectral_product.operands import NO_KEY, kept_keys
from klformer.ops.transforms import gradients_of, is_derived_again, is_transformed

#: Queries of a block: the first that is not below half of what they see besides each other, or the last.
BLOCKS = (16, 32, 64)
#: Scores that are worked on at a time, and rows that are laid out at a time, in bytes.
SCORE_BYTES, ROW_BYTES = 2**19, 2**22
LOG2_E, LN_2 = math.log2(math.e), math.log(2)

Result = tuple[Tensor, Tensor]


def near_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    causal: bool = False,
    before: int = 0,
) -> Result:
    """Attend from every query to its neighbours.

    Args:
        q: Queries (B, H, L, D), scaled: scores are q.k.
        k: Keys (B, H, S, D). Query i stands where key i + `before` does.
        v: Values (B, H, S, E).
        window: Keys w on each side of a query that it sees.
        key_mask: (B, S), True = keep.
        key_bias: Log-weights of the keys, (B or 1, H or 1, S); -inf is the same as a key that is not kept.
        causal: See no key after the query.
        before: Keys that stand before the first query.

    Returns:
        (B, H, L, E) in the type of q, 0 where no key is near; and the log-sums (B, H, L), -inf there. Computed in
        float32 at least. Differentiable in q, k, v and key_bias.

    Raises:
        ArgumentError: a shape does not fit, or the window is no whole number of at least 0.

    Examples:
        >>> import torch
        >>> from klformer.ops.near import near_attention
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
        >>> out, log_sum = near_attention(q, k, v, window=4)
        >>> out.shape, log_sum.shape
        (torch.Size([1, 2, 100, 8]), torch.Size([1, 2, 100]))
        >>> scores = q[0, 0, 50] @ k[0, 0, 46:55].T
        >>> torch.allclose(out[0, 0, 50], scores.softmax(-1) @ v[0, 0, 46:55], atol=1e-5)
        True
    """
    check_count("window", window, minimum=0)
    check_count("before", before, minimum=0)
    check_operands(q, k, v)
    check_key_mask(key_mask, k)
    check_key_bias(key_bias, k)
    kept, layout = kept_keys(key_mask, key_bias), Layout(window, 0 if causal else window, before)
    with full_precision(q) as dtype:
        for x in (k, v):
            dtype = torch.promote_types(dtype, x.dtype)
        operands = q.to(dtype), k.to(dtype), v.to(dtype)
        bias = None if key_bias is None else key_bias.to(dtype)
        traced = torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()
        if traced or is_transformed(*operands, bias):
            out, log_sum = _plain(*operands, bias, kept, layout)
        else:
            out, log_sum = _Near.apply(*operands, bias, kept, layout)  # type: ignore[no-untyped-call]
    return out.to(q.dtype), log_sum


def merge_results(first: Result, second: Result) -> Result:
    """Return one result of two, each with its log-sums: attention over the keys of both.

    Args:
        first: A result (B, H, L, E) and its log-sums (B, H, L), -inf where there was no key.
        second: Another, of the same queries.

    Returns:
        The result, 0 where neither had a key, and its log-sums. Differentiable.

    Raises:
        RuntimeError: shapes do not fit.

    Examples:
        >>> import torch, klformer
        >>> q, k, v, omega = torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 2, 7, 8), torch.randn(2, 16, 8)
        >>> given = {"feature_map": "prf", "return_log_sum": True}
        >>> parts = [(k[:, :, here], v[:, :, here]) for here in (slice(3), slice(3, 7))]
        >>> halves = [klformer.spectral_product(q, *keys, omega, **given) for keys in parts]
        >>> whole = klformer.spectral_product(q, k, v, omega, feature_map="prf")
        >>> torch.allclose(klformer.merge_results(*halves)[0], whole, atol=1e-5)
        True
    """
    (out, log_sum), (other, its) = first, second
    # -inf less -inf is not a number; this is, and as far below all others.
    operands = out, log_sum.clamp(min=NO_KEY), other, its.clamp(min=NO_KEY)
    traced = torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export() or is_transformed(*operands)
    merged, total = _merge(operands) if traced else _Merge.apply(*operands)  # type: ignore[no-untyped-call]
    return merged, total.masked_fill(total < NO_KEY / 2, -torch.inf)


def _merge(operands: Sequence[Tensor | None]) -> Result:
    """Return what `_Merge` does, in plain operations."""
    out, mine, other, its = cast(tuple[Tensor, Tensor, Tensor, Tensor], tuple(operands))
    share = (its - mine).sigmoid().unsqueeze(-1)
    return out + share.to(out.dtype) * (other - out), torch.logaddexp(mine, its)


class _Merge(torch.autograd.Function):
    """One node of autograd's graph: its own operations would write out five tensors of the size of a result."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, mine: Tensor, other: Tensor, its: Tensor) -> Result:
        share = (its - mine).sigmoid()
        ctx.save_for_backward(out, mine, other, its, share)
        return torch.lerp(out, other, share.unsqueeze(-1).to(out.dtype)), torch.logaddexp(mine, its)

    @staticmethod
    def backward(ctx: Any, d_merged: Tensor, d_total: Tensor) -> tuple[Tensor | None, ...]:
        *operands, share = ctx.saved_tensors
        if is_derived_again(d_merged) or is_derived_again(d_total):
            return tuple(gradients_of(_merge, operands, ctx.needs_input_grad, (d_merged, d_total)))
        out, _, other, _ = operands
        d_other = d_merged * share.unsqueeze(-1).to(d_merged.dtype)
        d_share = torch.sub(other, out).mul_(d_merged).sum(-1, dtype=share.dtype)
        slope, of_its = d_share * share * (1 - share), share * d_total
        return d_merged - d_other, d_total - of_its - slope, d_other, of_its + slope


@dataclass(frozen=True)
class Layout:
    """Which keys a query sees, and how a row lies in blocks."""

    left: int
    right: int
    before: int

    @property
    def block(self) -> int:
        """Queries of a block."""
        reach = (self.left + self.right) / 2
        return next((size for size in BLOCKS if size >= reach), BLOCKS[-1])

    @property
    def reach(self) -> int:
        """Keys of a block."""
        return self.block + self.left + self.right

    def num_blocks(self, length: int) -> int:
        """Return the blocks of a row of queries, with those whose place its last keys take."""
        return -(-length // self.block) + -(-(self.left + self.right) // self.block)

    def keys(self, num_keys: int, padded: int) -> tuple[slice, slice]:
        """Return which keys have a place in a row of that length, and where they stand in it."""
        shift = self.left - self.before
        first, last = max(0, -shift), max(0, min(num_keys, padded - shift))
        return slice(first, max(first, last)), slice(first + shift, max(first, last) + shift)

    def band(self, like: Tensor) -> Tensor:
        """Return 0 where a query of a block sees a key, -inf elsewhere, (block, reach)."""
        distance = torch.arange(self.reach, device=like.device) - torch.arange(self.block, device=like.device)[:, None]
        seen = (distance >= 0) & (distance <= self.left + self.right)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


class _Near(torch.autograd.Function):
    """One node of autograd's graph; its backward makes the scores again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kept: Tensor | None, layout: Layout
    ) -> Result:
        out, log_sum = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
        for rows in _rows(q, k, v, bias, kept, layout):
            results = rows.memory("out", v.shape[3])
            for blocks in rows.groups():
                weights, largest = rows.scores(blocks)
                total = weights.sub_(largest).exp2_().sum(-1, keepdim=True)
                torch.bmm(weights, rows.of_block("v", blocks), out=results[blocks])
                results[blocks].div_(total.masked_fill(total == 0, 1))
                rows.log_sum[blocks] = total.log2_().add_(largest).squeeze(-1)
            rows.write(out, results)
            rows.write(log_sum, rows.log_sum)
        log_sum.mul_(LN_2).masked_fill_(log_sum < NO_KEY / 2, -torch.inf)
        ctx.save_for_backward(q, k, v, bias, kept, out, log_sum)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, kept, out, log_sum = ctx.saved_tensors
        given, needs = (d_out, d_log_sum), ctx.needs_input_grad[:4]
        if all(d is None for d in given):
            return (None,) * 6
        if any(d is not None and is_derived_again(d) for d in given):

            def results(tensors: Sequence[Tensor | None]) -> Result:
                return _plain(*cast(tuple[Tensor, Tensor, Tensor, Tensor | None], tuple(tensors)), kept, ctx.layout)

            return *gradients_of(results, (q, k, v, bias), needs, given), None, None
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        d_bias = None if bias is None or not needs[3] else torch.zeros_like(bias)
        for rows in _rows(q, k, v, bias, kept, ctx.layout):
            of_out = rows.lay("d_out", d_out)
            # What the gradient of a score has besides that of its weight.
            products = torch.mul(of_out, rows.lay("out", out), out=rows.memory("products", v.shape[3]))
            of_excess = products.sum(-1, keepdim=True).neg_()
            if d_log_sum is not None:
                of_excess += rows.lay("excess", d_log_sum.unsqueeze(-1))
            of_log_sum = rows.lay("log_sum", log_sum.clamp(min=NO_KEY).mul(-LOG2_E).unsqueeze(-1), behind=NO_KEY)
            of_q = rows.memory("d_q", q.shape[3])
            of_k, of_v = rows.memory("d_k", k.shape[3], fill=0), rows.memory("d_v", v.shape[3], fill=0)
            of_bias = rows.memory("d_bias", 1, fill=0)
            for blocks in rows.groups():
                weights, _ = rows.scores(blocks, maxima=False)
                weights.add_(of_log_sum[blocks]).exp2_()
                rows.add_up(of_v, blocks, torch.bmm(weights.mT, of_out[blocks]))
                d_scores = torch.bmm(of_out[blocks], rows.of_block("v", blocks).mT)
                d_scores.add_(of_excess[blocks]).mul_(weights)
                torch.bmm(d_scores, rows.of_block("k", blocks), out=of_q[blocks])
                rows.add_up(of_k, blocks, torch.bmm(d_scores.mT, rows.queries[blocks]))
                if d_bias is not None:
                    rows.add_up(of_bias, blocks, d_scores.sum(1).unsqueeze(-1))
            rows.write(d_q, of_q)
            rows.write_keys(d_k, of_k.mul_(LN_2))
            rows.write_keys(d_v, of_v)
            if d_bias is not None:
                rows.add_keys(d_bias, of_bias)
        return d_q, d_k, d_v, d_bias, None, None


def _rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kept: Tensor | None, layout: Layout
) -> Iterator["_Rows"]:
    """Yield the (batch, head) rows in groups: whole batch entries, or one row of one."""
    batch, heads, length, width = q.shape
    row_bytes = layout.num_blocks(length) * layout.block * max(width, v.shape[3]) * q.dtype.itemsize
    fit = ROW_BYTES // max(1, row_bytes)
    step, head_step = (max(1, fit // max(1, heads)), heads) if fit >= heads else (1, max(1, fit))
    for entry in range(0, batch, step):
        for head in range(0, heads, head_step):
            here = slice(entry, min(entry + step, batch)), slice(head, min(head + head_step, heads))
            yield _Rows(q, k, v, bias, kept, layout, here)


class _Rows:
    """Some rows, laid out in blocks: queries (blocks, block, D), keys and values as rows of one long matrix."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        kept: Tensor | None,
        layout: Layout,
        here: tuple[slice, slice],
    ) -> None:
        self._like, self._layout, self._here = q, layout, here
        self._shape = (here[0].stop - here[0].start, here[1].stop - here[1].start)
        self._length, self._blocks_a_row = q.shape[2], layout.num_blocks(q.shape[2])
        self._num_blocks = math.prod(self._shape) * self._blocks_a_row
        self._padded = self._blocks_a_row * layout.block
        self._keys, self._places = layout.keys(k.shape[2], self._padded)
        self.queries = self.lay("q", q).mul_(LOG2_E)
        self.log_sum = self.memory("log_sums", 1).squeeze(-1)
        self._dropped = None if kept is None else ~self._of_keys(kept)
        self._of_block = {"k": self._lay_keys("k", k), "v": self._lay_keys("v", v)}
        self._bias, self._band = self._lay_bias(bias), layout.band(q)
        blocks = self._strided(self._bias).squeeze(-1)
        #: Blocks whose keys have log-weights, or are not there; all on a device that would have to be waited for.
        self._weighted = (blocks != 0).any(-1).tolist() if q.device.type == "cpu" else [True] * self._num_blocks
        self._biases = blocks.unsqueeze(1)

    def memory(self, use: str, width: int, *, fill: float | None = None, edge: float | None = None) -> Tensor:
        """Return room for numbers by query or by key, (blocks, block, width); the next rows overwrite it.

        Args:
            use: Another room for the same use is the same memory.
            width: Numbers of each.
            fill: What is in it; nothing certain if None.
            edge: What is behind its end.
        """
        layout = self._layout
        # The last blocks of the last row reach beyond its end.
        count = self._num_blocks * layout.block + layout.reach
        flat = borrow(f"near {use}", (count, width), self._like, self._like.dtype)
        if fill is not None:
            flat.fill_(fill)
        if edge is not None:
            flat[-layout.reach :] = edge
        return flat[: self._num_blocks * layout.block].view(self._num_blocks, layout.block, width)

    def lay(self, use: str, x: Tensor, *, behind: float = 0) -> Tensor:
        """Return what is by query (B, H, L, .) in blocks, and a number behind the end of a row."""
        room = self.memory(use, x.shape[3])
        by_row = room.view(*self._shape, self._padded, x.shape[3])
        by_row[:, :, : self._length] = x[self._here]
        by_row[:, :, self._length :] = behind
        return room

    def write(self, place: Tensor, blocks: Tensor) -> None:
        """Write what is by query in blocks to a tensor (B, H, L, .) or (B, H, L)."""
        by_row = blocks.reshape(*self._shape, self._padded, *blocks.shape[2:])
        place[self._here] = by_row[:, :, : self._length]

    def _of_keys(self, x: Tensor) -> Tensor:
        """Return what is by key (B or 1, H or 1, S), of those that have a place."""
        x = x[self._here[0]] if x.shape[0] > 1 else x
        x = x[:, self._here[1]] if x.shape[1] > 1 else x
        return x[..., self._keys]

    def _lay_keys(self, use: str, x: Tensor) -> Tensor:
        """Return keys or values by block, (blocks, reach, .): views of one matrix, zeros where there is none."""
        room, rows = self.memory(use, x.shape[3], edge=0), x[self._here][:, :, self._keys]
        if self._dropped is not None:
            rows = rows.masked_fill(self._dropped.unsqueeze(-1), 0)
        by_row = room.view(*self._shape, self._padded, x.shape[3])
        by_row[:, :, : self._places.start] = 0
        by_row[:, :, self._places] = rows
        by_row[:, :, self._places.stop :] = 0
        return self._strided(room)

    def _lay_bias(self, bias: Tensor | None) -> Tensor:
        """Return log-weights to base 2, -inf where there is no key, (blocks, block, 1)."""
        room = self.memory("bias", 1, fill=-torch.inf)
        by_row = room.view(*self._shape, self._padded)
        weights = self._like.new_zeros(1, 1, 1) if bias is None else self._of_keys(bias) * LOG2_E
        if self._dropped is not None:
            weights = weights.masked_fill(self._dropped, -torch.inf)
        by_row[:, :, self._places] = weights
        return room

    def _strided(self, room: Tensor) -> Tensor:
        """Return room for keys as the blocks see it, (blocks, reach, .)."""
        width, layout = room.shape[2], self._layout
        return room.as_strided((self._num_blocks, layout.reach, width), (layout.block * width, width, 1))

    def of_block(self, use: str, blocks: slice) -> Tensor:
        """Return keys "k" or values "v" of some blocks, (blocks, reach, .)."""
        return self._of_block[use][blocks]

    def groups(self) -> Iterator[slice]:
        """Yield blocks that are worked on together."""
        layout = self._layout
        step = max(1, SCORE_BYTES // (layout.block * layout.reach * self._like.dtype.itemsize))
        step = step if self._like.device.type == "cpu" else max(1, self._num_blocks)
        for start in range(0, self._num_blocks, step):
            yield slice(start, min(start + step, self._num_blocks))

    def scores(self, blocks: slice, *, maxima: bool = True) -> Result:
        """Return scores to base 2 (blocks, block, reach), -inf for what is not seen, and the largest of each query."""
        shape = (blocks.stop - blocks.start, self._layout.block, self._layout.reach)
        scores = borrow("near scores", shape, self._like, self._like.dtype)
        torch.bmm(self.queries[blocks], self._of_block["k"][blocks].mT, out=scores).add_(self._band)
        if any(self._weighted[blocks]):
            scores.add_(self._biases[blocks])
        return scores, scores.amax(-1, keepdim=True).clamp_(min=NO_KEY) if maxima else scores

    def add_up(self, room: Tensor, blocks: slice, by_block: Tensor) -> None:
        """Add what blocks say of their keys (blocks, reach, .) to what is by key: neighbours share keys."""
        flat = room.as_strided(
            (self._num_blocks + self._layout.reach // self._layout.block, *room.shape[1:]), room.stride()
        )
        for number, part in enumerate(by_block.split(self._layout.block, dim=1)):  # type: ignore[no-untyped-call]
            flat[blocks.start + number : blocks.stop + number, : part.shape[1]] += part

    def _kept_keys(self, room: Tensor) -> Tensor:
        rows = room.reshape(*self._shape, self._padded, room.shape[2])[:, :, self._places]
        return rows if self._dropped is None else rows.masked_fill(self._dropped.unsqueeze(-1), 0)

    def write_keys(self, place: Tensor, room: Tensor) -> None:
        """Write what is by key to a tensor (B, H, S, .); 0 for what is not kept."""
        place[self._here][:, :, self._keys] = self._kept_keys(room)

    def add_keys(self, place: Tensor, room: Tensor) -> None:
        """Add what is by key to a tensor (B or 1, H or 1, S)."""
        batch, heads = (
            here if size > 1 else slice(None) for here, size in zip(self._here, place.shape[:2], strict=True)
        )
        room = self._kept_keys(room).squeeze(-1)
        target = place[batch, heads][..., self._keys]
        target += room.sum_to_size(target.shape)


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kept: Tensor | None, layout: Layout) -> Result:
    """Return what `_Near` does, in plain operations: every derivative that torch can take, and any program."""
    if torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export():
        return _plain_by_query(q, k, v, bias, kept, layout)
    length, size = q.shape[2], layout.block
    num_blocks = (length + size - 1) // size
    starts = size * torch.arange(num_blocks, device=q.device)[:, None]
    # Places of keys as a block sees them, and where they are none.
    places = starts + torch.arange(layout.reach, device=q.device) + (layout.before - layout.left)
    nowhere = (places < 0) | (places >= k.shape[2])
    places = places.clamp(min=0).clamp(max=max(k.shape[2], 1) - 1)
    if k.shape[2] == 0:
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        bias, kept = (None if x is None else pad(x, (0, 1)) for x in (bias, kept))
    if kept is not None:
        k, v = (x.masked_fill(~kept.unsqueeze(-1), 0) for x in (k, v))
    rows = (starts + torch.arange(size, device=q.device)).clamp(max=max(length, 1) - 1)
    # (B, H, blocks, block, reach)
    scores = q[:, :, rows] @ k[:, :, places].mT + layout.band(q)
    if bias is not None:
        scores = scores + bias[:, :, places].masked_fill(nowhere, 0).unsqueeze(-2)
    hidden = nowhere if kept is None else nowhere | ~kept[:, :, places]
    # A number, of which derivatives are numbers too, and far below all others.
    scores = scores.masked_fill(hidden.unsqueeze(-2), -torch.inf).clamp(min=2 * NO_KEY)
    log_sum = scores.logsumexp(-1)
    none = log_sum < NO_KEY
    weights = (scores - log_sum.unsqueeze(-1)).exp().masked_fill(none.unsqueeze(-1), 0)
    out = (weights @ v[:, :, places]).flatten(2, 3)[:, :, :length]
    return out, log_sum.masked_fill(none, -torch.inf).flatten(2, 3)[:, :, :length]


def _plain_by_query(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kept: Tensor | None, layout: Layout
) -> Result:
    """Return what `_plain` does without blocks, whose number a program for any length would have to know."""
    length, num_keys = q.shape[2], k.shape[2]
    if kept is not None:
        k, v = (x.masked_fill(~kept.unsqueeze(-1), 0) for x in (k, v))
    places = torch.arange(length, device=q.device)[:, None] + (layout.before - layout.left)
    places = places + torch.arange(layout.left + layout.right + 1, device=q.device)  # (L, keys)
    nowhere = (places < 0) | (places >= num_keys)
    places = torch.where(nowhere, num_keys, places)  # a key behind the last one
    k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    scores = (k[:, :, places] @ q.unsqueeze(-1)).squeeze(-1)  # (B, H, L, keys)
    if bias is not None:
        scores = scores + pad(bias, (0, 1))[:, :, places]
    hidden = nowhere if kept is None else nowhere | ~pad(kept, (0, 1))[:, :, places]
    scores = scores.masked_fill(hidden, -torch.inf).clamp(min=2 * NO_KEY)
    log_sum = scores.logsumexp(-1)
    none = log_sum < NO_KEY
    weights = (scores - log_sum.unsqueeze(-1)).exp().masked_fill(none.unsqueeze(-1), 0)
    return (weights.unsqueeze(-2) @ v[:, :, places]).squeeze(-2), log_sum.masked_fill(none, -torch.inf)
