"""Exact attention of every query to its neighbours, with its log-sum, in time and memory linear in the length.

    out_i = sum_j p_ij v_j    p_ij = exp(q_i.k_j + b_j - log_sum_i)    log_sum_i = log sum_j exp(q_i.k_j + b_j)

over the keys at a distance of at most w; if causal over the w before and the query's own. Queries come scaled. The
log-sum makes results over disjoint sets of keys, or over the same with other kernels, one (`merge_results`).

Another result of the same queries may be merged in, with F_i its log-sum: one more key, whose score is F_i and whose
value is that result. That of a kernel is computed in the same node of autograd's graph.

Blocks of queries meet the keys in their reach: (block, block + 2 w) scores under a band. A tile is some rows, or some
tokens of one, that fit a cache; its operands are laid out there, blocks at one distance in memory, so that all of them
are one matrix product. Scores are made again in backward. They are to base 2, which costs a third of an exponential.

On a GPU kernels in Triton take over (`triton/near.py`), once they have been right there (`self_check.py`).
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.functional import pad

from klformer.checks import check_count
from klformer.ops.precision import full_precision
from klformer.ops.shapes import check_key_bias, check_key_mask, check_operands
from klformer.ops.spectral_product import plain
from klformer.ops.spectral_product.autograd import FusedBackend, gradients_by_name
from klformer.ops.spectral_product.chunked.memory import borrow
from klformer.ops.spectral_product.dispatch import SELF_CHECK, asked_for, choose_backend
from klformer.ops.spectral_product.operands import NO_KEY, TENSORS, Call, Step, kept_keys
from klformer.ops.transforms import gradients_of, is_derived_again, is_transformed
from klformer.ops.triton.backend import why_not

#: Queries of a block: the first that is not below half of what they see besides each other, or the last.
BLOCKS = (16, 32, 64)
#: One operand of a tile, in bytes: some of them fit a cache of a CPU; a GPU wants few calls.
CPU_TILE_BYTES, GPU_TILE_BYTES = 2**20, 2**26
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
    scale: Tensor | None = None,
    far: Result | Call | None = None,
    far_offset: Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """Attend from every query to its neighbours.

    Args:
        q: Queries (B, H, L, D).
        k: Keys (B, H, S, D). Query i stands where key i + `before` does.
        v: Values (B, H, S, E).
        window: Keys w on each side of a query that it sees.
        key_mask: (B, S), True = keep.
        key_bias: Log-weights of the keys, (B or 1, H or 1, S); -inf is the same as a key that is not kept.
        causal: See no key after the query.
        before: Keys that stand before the first query.
        scale: What scores q.k are multiplied by, (H,); 1 if None.
        far: What to merge with: another result (B, H, L, E) of the same queries and its log-sums (B, H, L), or the
            call of a kernel that gives them ("product" or "causal"); an envelope of norms counts for queries, too.
        far_offset: Added to these log-sums, (B or 1, H or 1, L or 1).
        backend: Who computes the call, as in `spectral_product`.

    Returns:
        (B, H, L, E) in the type of q, 0 where no key is near; and the log-sums (B, H, L), -inf there. Computed in
        float32 at least. Differentiable in all tensors.

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
    kept, how = kept_keys(key_mask, key_bias), _How(Layout(window, 0 if causal else window, before))
    with full_precision(q) as dtype:
        for x in (k, v):
            dtype = torch.promote_types(dtype, x.dtype)
        of_call: tuple[Tensor | None, ...] = ()
        traced = torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()
        kernels = None if traced or is_transformed(q, k, v) else _proven_kernels(q.to(dtype), k, v)
        if isinstance(far, Call):
            how = replace(how, norm_coefficient=far.kernel.norm_coefficient)
            chosen = choose_backend(far, backend)
            if traced or kernels or not isinstance(chosen, FusedBackend) or not q.dtype == k.dtype == v.dtype == dtype:
                far = chosen.causal(far)[:2] if far.step == "causal" else chosen.product(far)
            else:
                shared, of_call = (
                    tuple(x is y for x, y in ((q, far.q), (k, far.k), (v, far.v))),
                    (*far.tensors().values(),),
                )
                how = replace(
                    how, backend=chosen, step=far.step, constants=far.constants, shared=shared, keep=far.wants_gradients
                )
                far = None
        offset = None if far_offset is None else far_offset.expand(q.shape[:3])
        given = (q, k, v, key_bias, scale, offset, *((None, None) if far is None else far))
        operands = [None if x is None else x.to(dtype) for x in given]
        if traced or is_transformed(*operands):
            out, log_sum = _plain(how, kept, operands)
        elif kernels is not None:
            *near, _, far_out, of_far = operands
            out, log_sum = attend((*near, far_out, _beside(how, q, offset, of_far)), kept, how.layout, kernels)
        else:
            out, log_sum = _Near.apply(how, kept, *operands, *of_call)  # type: ignore[no-untyped-call]
    return out.to(q.dtype), log_sum


def attend(
    operands: Sequence[Tensor | None], kept: Tensor | None, layout: "Layout", kernels: ModuleType | None
) -> Result:
    """Return results and log-sums of operands in one type, as one node of autograd's graph.

    Args:
        operands: Queries, keys, values, log-weights, scale, another result and its log-sums.
        kept: Which keys there are, (B or 1, H or 1, S).
        layout: Which of them a query sees.
        kernels: Those for a GPU; None for tiles in plain PyTorch.
    """
    if kernels is not None:
        return _OnGpu.apply(kernels, kept, layout, *operands)  # type: ignore[no-untyped-call]
    given = (*operands[:5], None, *operands[5:])
    return _Near.apply(_How(layout), kept, *given)  # type: ignore[no-untyped-call]


def _proven_kernels(q: Tensor | None, k: Tensor | None, v: Tensor | None) -> ModuleType | None:
    """Return the kernels for a GPU where they serve, were right, and nobody asked for plain PyTorch."""
    assert q is not None
    assert k is not None
    assert v is not None
    if why_not(q, q.dtype, v.shape[3]) is not None or not k.numel() or isinstance(q, FakeTensor):
        return None
    if asked_for() in ("chunked", "plain", "reference"):
        return None
    if os.environ.get(SELF_CHECK) != "0":
        from klformer.ops.spectral_product.self_check import near_is_right

        if not near_is_right(q.device):
            return None
    return near_kernels()


def near_kernels() -> ModuleType:
    """Import what launches the kernels for a GPU."""
    return import_module("klformer.ops.triton.near_calls")


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
    mine, its = log_sum.clamp(min=NO_KEY), its.clamp(min=NO_KEY)
    share = (its - mine).sigmoid().unsqueeze(-1).to(out.dtype)
    total = torch.logaddexp(mine, its)
    return torch.lerp(out, other, share), total.masked_fill(total < NO_KEY / 2, -torch.inf)


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

    def keys(self, start: int, num_keys: int, room: int) -> tuple[slice, slice]:
        """Return the keys of a tile whose first query is `start`, and where they stand in its room for keys."""
        shift = self.left - self.before - start
        first, last = max(0, -shift), max(0, min(num_keys, room - shift))
        return slice(first, max(first, last)), slice(first + shift, max(first, last) + shift)

    def band(self, like: Tensor) -> Tensor:
        """Return 0 where a query of a block sees a key, -inf elsewhere, (block, reach)."""
        distance = torch.arange(self.reach, device=like.device) - torch.arange(self.block, device=like.device)[:, None]
        seen = (distance >= 0) & (distance <= self.left + self.right)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


@dataclass(frozen=True)
class _How:
    """What `_Near` computes, besides its tensors."""

    layout: Layout
    #: c where the envelope exp(-c |q|^2) of queries is not in the other result's log-sums.
    norm_coefficient: float = 0.0
    #: Who computes the other result, where it is that of a kernel; its step and constants (`Call.of`).
    backend: FusedBackend | None = None
    step: Step = "product"
    constants: tuple[str, bool, float] = ("", False, 0.0)
    #: Which of q, k and v are also those of the kernel.
    shared: tuple[bool, ...] = (False, False, False)
    #: Whether there will be a backward.
    keep: bool = True

    def call(self, tensors: Sequence[Tensor | None]) -> Call:
        """Return the call of the kernel."""
        return Call.of(self.step, tuple(tensors), *self.constants)


class _Operands(NamedTuple):
    """The tensors that `_Near` takes before those of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    scale: Tensor | None
    offset: Tensor | None
    far: Tensor | None = None
    far_log_sum: Tensor | None = None


NUM_OPERANDS = len(_Operands._fields)


class _Near(torch.autograd.Function):
    """One node of autograd's graph; its backward makes the scores again.

    If the other result is that of a kernel, the node computes it, too. Its keys and the near ones are then keys of one
    attention: the kernel's gradients are those of the merged result and log-sum, and what near keys add to the
    gradients of queries, keys and values is added in place.
    """

    @staticmethod
    def forward(ctx: Any, how: _How, kept: Tensor | None, *tensors: Tensor) -> Result:
        operands, outputs = _Operands(*tensors[:NUM_OPERANDS]), []
        if how.backend is not None:
            outputs = how.backend.results(how.call(tensors[NUM_OPERANDS:]), keep=how.keep)
            operands = operands._replace(far=outputs[0], far_log_sum=outputs[1])
        q, _, v, _, _, _, far, beside = operands
        offset = _offset(operands, how)
        beside = beside if beside is None or offset is None else beside + offset
        # The merged result takes the place of the kernel's.
        out = outputs[0] if outputs else q.new_empty(*q.shape[:3], v.shape[3])
        log_sum = q.new_empty(q.shape[:3])
        for tile in _tiles(operands, kept, how.layout):
            weights = tile.scores()
            largest = weights.amax(-1, keepdim=True)
            if beside is not None:
                of_far = tile.lay("far", beside.unsqueeze(-1), LOG2_E)
                torch.maximum(largest, of_far, out=largest)
            largest.clamp_(min=NO_KEY)
            total = weights.sub_(largest).exp2_().sum(-1, keepdim=True)
            result = torch.bmm(weights, tile.values, out=tile.by_query("result", v.shape[3]))
            if far is not None:
                share = of_far.sub_(largest).exp2_()
                total += share
                tile.rows(result).addcmul_(far[tile.place], tile.rows(share))
            torch.div(tile.rows(result), tile.rows(total.masked_fill(total == 0, 1)), out=out[tile.place])
            log_sum[tile.place] = tile.rows(total.log2_().add_(largest)).squeeze(-1)
        log_sum.mul_(LN_2).masked_fill_(log_sum < NO_KEY / 2, -torch.inf)
        ctx.save_for_backward(kept, out, log_sum, offset, *tensors, *outputs[1:])
        ctx.how = how
        ctx.set_materialize_grads(False)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        how, (kept, out, log_sum, offset, *saved) = ctx.how, ctx.saved_tensors
        needs, given = ctx.needs_input_grad[2:], (d_out, d_log_sum)
        tensors, outputs = saved[: len(needs)], saved[len(needs) :]
        if all(d is None for d in given):
            return (None,) * (2 + len(needs))
        if any(d is not None and is_derived_again(d) for d in given):
            return None, None, *gradients_of(lambda x: _plain(how, kept, x), tensors, needs, given)
        operands, of_call = _Operands(*tensors[:NUM_OPERANDS]), tensors[NUM_OPERANDS:]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        if d_log_sum is not None:
            d_log_sum = d_log_sum.masked_fill(log_sum == -torch.inf, 0)
        of_kernel: dict[str, Tensor] = {}
        if how.backend is not None:
            call, among = how.call(of_call), log_sum if offset is None else log_sum - offset
            merged = how.backend.among_others(call, [out, *outputs], out, among)
            d_results, needed = [d_out, d_log_sum, None, None, None], needs[NUM_OPERANDS:]
            of_kernel = gradients_by_name(how.backend, call, merged, d_results, needed)
        d_q, d_k, d_v = (
            of_kernel.pop(name) if is_shared and name in of_kernel else torch.zeros_like(x)
            for name, x, is_shared in zip("qkv", operands[:3], how.shared, strict=True)
        )
        q, _, _, bias, scale, _, far, far_log_sum = operands
        d_bias, d_scale, d_far = (None if x is None else torch.zeros_like(x) for x in (bias, scale, far))
        d_beside = torch.zeros_like(log_sum) if d_log_sum is None else d_log_sum.clone()
        reference = log_sum.clamp(min=NO_KEY).unsqueeze(-1)
        for tile in _tiles(operands, kept, how.layout):
            of_out, excess = tile.lay("d_out", d_out), tile.by_query("excess", 1, behind=0)
            # What the gradient of a score has besides that of its weight.
            torch.neg(_dots(d_out[tile.place], out[tile.place]).unsqueeze(-1), out=tile.rows(excess))
            if d_log_sum is not None:
                tile.rows(excess).add_(d_log_sum[tile.place].unsqueeze(-1))
            weights = tile.scores().sub_(tile.lay("log_sum", reference, LOG2_E, behind=-NO_KEY)).exp2_()
            tile.add_to_keys(d_v, "d_v", weights, of_out)
            d_scores = torch.bmm(of_out, tile.values.mT, out=tile.memory("d_scores", weights.shape))
            d_scores.add_(excess).mul_(weights)
            # The gradients of all scores of a query add up to that of its log-sum.
            d_beside[tile.place] -= tile.rows(d_scores.sum(-1, keepdim=True)).squeeze(-1)
            of_q = tile.rows(torch.bmm(d_scores, tile.keys, out=tile.by_query("d_q", d_q.shape[3])))
            d_q[tile.place].addcmul_(of_q, tile.scale)
            if d_scale is not None:
                d_scale[tile.heads] += of_q.mul_(q[tile.place]).sum((0, 2, 3))
            tile.add_to_keys(d_k, "d_k", d_scores, tile.queries, LN_2)
            if d_bias is not None:
                tile.add_to_biases(d_bias, d_scores)
            if d_far is not None and far_log_sum is not None:
                beside = far_log_sum[tile.place] + (0 if offset is None else offset[tile.place])
                share = (beside - reference[tile.place].squeeze(-1)).exp_()
                torch.mul(d_out[tile.place], share.unsqueeze(-1), out=d_far[tile.place])
            if how.norm_coefficient:
                d_norms = d_beside[tile.place].unsqueeze(-1)
                d_q[tile.place].addcmul_(q[tile.place], d_norms, value=-2 * how.norm_coefficient)
        d_offset = None if operands.offset is None else d_beside
        d_result = (None, None) if d_far is None else (d_far, d_beside)
        found = (d_q, d_k, d_v, d_bias, d_scale, d_offset, *d_result)
        return None, None, *found, *([of_kernel.get(name) for name in TENSORS] if of_call else [])


class _OnGpu(torch.autograd.Function):
    """One node of autograd's graph, computed by kernels for a GPU."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, kept: Tensor | None, layout: Layout, *operands: Tensor | None) -> Result:
        ctx.layout, ctx.kernels = layout, kernels
        ctx.set_materialize_grads(False)
        out, log_sum = kernels.forward(operands, kept, layout)
        ctx.save_for_backward(*operands, kept, out, log_sum)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        *operands, kept, out, log_sum = ctx.saved_tensors
        given, needs = (d_out, d_log_sum), ctx.needs_input_grad[3:]
        if all(d is None for d in given):
            return (None,) * 10
        if any(d is not None and is_derived_again(d) for d in given):
            found = gradients_of(lambda tensors: attend_plainly(tensors, kept, ctx.layout), operands, needs, given)
        else:
            d_out = torch.zeros_like(out) if d_out is None else d_out
            found = ctx.kernels.backward(operands, kept, ctx.layout, (out, log_sum), d_out, d_log_sum)
        return None, None, None, *found


def _offset(operands: _Operands, how: _How) -> Tensor | None:
    """Return what is added to the log-sums of the other result, (B, H, L): what was given, less norms of queries."""
    q, offset = operands.q, operands.offset
    if offset is None and not how.norm_coefficient:
        return None
    found = q.new_zeros(q.shape[:3]) if offset is None else offset.expand(q.shape[:3]).clone()
    if how.norm_coefficient:
        for place in _places(operands, how.layout):
            found[place].sub_(_dots(q[place], q[place]), alpha=how.norm_coefficient)
    return found


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the products of vectors (b, h, length, .) with each other, (b, h, length)."""
    return torch.mul(x, y, out=borrow("near products", tuple(x.shape), x, x.dtype)).sum(-1)


#: Batch entries, heads and tokens of a tile.
Place = tuple[slice, slice, slice]


def _places(operands: _Operands, layout: Layout) -> Iterator[Place]:
    """Yield the (batch, head) rows in tiles: whole batch entries, some heads of one, or some tokens of one row."""
    q, _, v, *_ = operands
    batch, heads, length, width = q.shape
    budget = CPU_TILE_BYTES if q.device.type == "cpu" else GPU_TILE_BYTES
    fit = max(layout.block, budget // (max(width, v.shape[3], 1) * q.dtype.itemsize))
    rows = fit // (-(-length // layout.block) * layout.block + layout.reach)
    step, head_step = (rows // max(1, heads), heads) if rows >= heads > 0 else (1, max(1, rows))
    tokens = max(1, length) if rows > 1 else fit // layout.block * layout.block
    for entry in range(0, batch, step):
        for head in range(0, heads, head_step):
            here = slice(entry, min(entry + step, batch)), slice(head, min(head + head_step, heads))
            for start in range(0, length, tokens):
                yield *here, slice(start, min(start + tokens, length))


def _tiles(operands: _Operands, kept: Tensor | None, layout: Layout) -> Iterator["_Tile"]:
    """Yield the tiles of a call."""
    band = layout.band(operands.q)
    for place in _places(operands, layout):
        yield _Tile(operands, kept, layout, band, place)


class _Tile:
    """Some rows or tokens, laid out in blocks: queries (blocks, block, D), keys and values as the blocks see them."""

    def __init__(self, operands: _Operands, kept: Tensor | None, layout: Layout, band: Tensor, place: Place) -> None:
        q, k, v, bias, scale, *_ = operands
        *here, self._tokens = place
        start, stop = self._tokens.start, self._tokens.stop
        self._like, self._layout, self._here, self._band = q, layout, tuple(here), band
        self.heads, self.place = here[1], place
        self._shape, seen = tuple(x.stop - x.start for x in here), layout.left + layout.right
        more = -(-seen // layout.block)
        # Rows behind each other: blocks at the end of one see no key of the next.
        single = math.prod(self._shape) == 1
        blocks = -(-(stop - start) // layout.block) + (0 if single else more)
        self._padded, self._num_blocks = blocks * layout.block, math.prod(self._shape) * blocks
        #: Blocks of the room for keys, and the slots of a row in it.
        self._key_blocks = self._num_blocks + more
        self._slots = self._padded + more * layout.block if single else self._padded
        self._keys, self._places = layout.keys(start, k.shape[2], self._padded + seen if single else self._padded)
        dropped = None if kept is None else ~self._of_keys(kept)
        # To look costs little, but for a GPU, which would have to be waited for.
        self._dropped = None if dropped is None or (q.device.type == "cpu" and not dropped.any()) else dropped
        self.scale = q.new_ones(()) if scale is None else scale[here[1]][:, None, None]
        #: Whether there are keys on all places of one row, so that they are seen where they are.
        self._full = single and self._places == slice(0, self._padded + seen)
        self.queries = self.lay("q", q, self.scale * LOG2_E)
        self.keys, self.values = self._lay_keys("k", k), self._lay_keys("v", v)
        self._biases = self._lay_bias(bias)

    def memory(self, use: str, shape: Sequence[int]) -> Tensor:
        """Return uninitialised memory; the next tile overwrites it."""
        return borrow(f"near {use}", tuple(shape), self._like, self._like.dtype)

    # By query.

    def by_query(self, use: str, width: int, *, behind: float | None = None) -> Tensor:
        """Return room for numbers by query, (blocks, block, width), with a number where there is no query."""
        room = self.memory(use, (self._num_blocks, self._layout.block, width))
        if behind is not None and self._padded > self._tokens.stop - self._tokens.start:
            room.view(*self._shape, self._padded, width)[:, :, self._tokens.stop - self._tokens.start :] = behind
        return room

    def rows(self, blocks: Tensor) -> Tensor:
        """Return what is by query in blocks as (b, h, tokens, .), a view."""
        by_row = blocks.view(*self._shape, self._padded, blocks.shape[2])
        return by_row[:, :, : self._tokens.stop - self._tokens.start]

    def lay(self, use: str, x: Tensor, factor: float | Tensor = 1.0, *, behind: float = 0) -> Tensor:
        """Return what is by query (B, H, L, .) in blocks, times a factor, and a number where there is no query."""
        room = self.by_query(use, x.shape[3], behind=behind)
        torch.mul(x[self.place], factor, out=self.rows(room))
        return room

    # By key.

    def _of_keys(self, x: Tensor) -> Tensor:
        """Return what is by key (B or 1, H or 1, S) for those of this tile."""
        x = x[self._here[0]] if x.shape[0] > 1 else x
        x = x[:, self._here[1]] if x.shape[1] > 1 else x
        return x[..., self._keys]

    def _by_key(self, use: str, width: int, fill: float) -> tuple[Tensor, Tensor]:
        """Return room for numbers by key, (blocks, block, width), and its rows (b, h, slots, width); filled where there
        is no key."""
        room = self.memory(use, (self._key_blocks, self._layout.block, width))
        slots = math.prod(self._shape) * self._slots
        flat = room.view(-1, width)
        rows = flat[:slots].view(*self._shape, self._slots, width)
        if self._places.start:
            rows[:, :, : self._places.start] = fill
        if self._places.stop < self._slots:
            rows[:, :, self._places.stop :] = fill
        if slots < len(flat):
            flat[slots:] = fill
        return room, rows

    def _seen(self, room: Tensor) -> Tensor:
        """Return room for keys as the blocks see it, (blocks, reach, .)."""
        width, layout = room.shape[2], self._layout
        return room.as_strided((self._num_blocks, layout.reach, width), (layout.block * width, width, 1))

    def _lay_keys(self, use: str, x: Tensor) -> Tensor:
        """Return keys or values as the blocks see them, zeros where there is none."""
        given = x[self._here][:, :, self._keys]
        if self._full and self._dropped is None:
            stride = given.stride()
            shape = (self._num_blocks, self._layout.reach, x.shape[3])
            return given.as_strided(shape, (self._layout.block * stride[2], *stride[2:]))
        room, rows = self._by_key(use, x.shape[3], 0)
        rows[:, :, self._places] = given
        if self._dropped is not None:
            rows[:, :, self._places].masked_fill_(self._dropped.unsqueeze(-1), 0)
        return self._seen(room)

    def _lay_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return log-weights to base 2, -inf where there is no key, (blocks, 1, reach); None where all are 0."""
        if bias is None and self._dropped is None and self._full:
            return None
        room, rows = self._by_key("bias", 1, -torch.inf)
        rows[:, :, self._places] = 0 if bias is None else (self._of_keys(bias) * LOG2_E).unsqueeze(-1)
        if self._dropped is not None:
            rows[:, :, self._places].masked_fill_(self._dropped.unsqueeze(-1), -torch.inf)
        return self._seen(room).mT

    def scores(self) -> Tensor:
        """Return scores to base 2 (blocks, block, reach), -inf for what is not seen."""
        scores = self.memory("scores", (self._num_blocks, self._layout.block, self._layout.reach))
        torch.bmm(self.queries, self.keys.mT, out=scores).add_(self._band)
        return scores if self._biases is None else scores.add_(self._biases)

    def _added_up(self, use: str, by_block: Tensor) -> Tensor:
        """Return what blocks say of their keys (blocks, reach, .), added up by key, (b, h, keys, .)."""
        count, width = self._num_blocks, by_block.shape[2]
        room = self.memory(use, (self._key_blocks, self._layout.block, width))
        rows = room.view(-1, width)[: math.prod(self._shape) * self._slots].view(*self._shape, self._slots, width)
        for number, part in enumerate(by_block.split(self._layout.block, dim=1)):  # type: ignore[no-untyped-call]
            size = part.shape[1]
            if number:
                room[number : count + number, :size] += part
            else:
                room[:count].copy_(part)
                room[count:] = 0
        rows = rows[:, :, self._places]
        return rows if self._dropped is None else rows.masked_fill_(self._dropped.unsqueeze(-1), 0)

    def add_to_keys(self, place: Tensor, use: str, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
        """Add products (blocks, queries, reach), (blocks, queries, .) over queries to what is by key (B, H, S, .)."""
        shape = (left.shape[0], left.shape[2], right.shape[2])
        rows = self._added_up(use, torch.bmm(left.mT, right, out=self.memory("by block", shape)))
        place[self._here][:, :, self._keys].add_(rows, alpha=factor)

    def add_to_biases(self, place: Tensor, d_scores: Tensor) -> None:
        """Add the gradients of scores to that of log-weights, (B or 1, H or 1, S)."""
        rows = self._added_up("d_bias", d_scores.sum(1).unsqueeze(-1)).squeeze(-1)
        batch, heads = (
            here if size > 1 else slice(None) for here, size in zip(self._here, place.shape[:2], strict=True)
        )
        target = place[batch, heads][..., self._keys]
        target += rows.sum_to_size(target.shape)


def _plain(how: _How, kept: Tensor | None, tensors: Sequence[Tensor | None]) -> Result:
    """Return what `_Near` does, in plain operations: every derivative that torch can take, and any program."""
    *near, offset, far, log_sum = tensors[:NUM_OPERANDS]
    if how.backend is not None:
        far, log_sum = plain.results(how.call(tensors[NUM_OPERANDS:]), None)[:2]
    return attend_plainly((*near, far, _beside(how, near[0], offset, log_sum)), kept, how.layout)


def _beside(how: _How, q: Tensor | None, offset: Tensor | None, log_sum: Tensor | None) -> Tensor | None:
    """Return the log-sums of the other result with all that is added to them."""
    if log_sum is None or q is None:
        return None
    log_sum = log_sum if offset is None else log_sum + offset
    return log_sum - how.norm_coefficient * q.square().sum(-1) if how.norm_coefficient else log_sum


def attend_plainly(operands: Sequence[Tensor | None], kept: Tensor | None, layout: Layout) -> Result:
    """Return what `attend` does, in plain operations: every derivative that torch can take, and any program."""
    q, k, v, bias, scale, far, far_log_sum = operands
    assert q is not None
    assert k is not None
    assert v is not None
    q = q if scale is None else q * scale[:, None, None]
    near = _plain_near(q, k, v, bias, kept, layout)
    return near if far is None or far_log_sum is None else merge_results((far, far_log_sum), near)


def _plain_near(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kept: Tensor | None, layout: Layout) -> Result:
    """Return the result of neighbours alone."""
    length, size = q.shape[2], layout.block
    # In a program that is exported the length is a symbol: there are at least two blocks, so that no axis is one.
    exporting = torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()
    num_blocks = (length + size - 1) // size + exporting
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
    here, out = torch.arange(length, device=q.device), weights @ v[:, :, places]
    log_sum = log_sum.masked_fill(none, -torch.inf)
    return out.flatten(2, 3).index_select(2, here), log_sum.flatten(2, 3).index_select(2, here)
