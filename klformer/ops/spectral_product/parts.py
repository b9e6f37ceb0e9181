"""The product of a sequence that is in parts, each with somebody else: who has a part sees the sums of the others.

    bidirectional   the sums of all parts, relative to the largest shift:        one maximum, one sum
    causal          the sums of the parts before, relative to the largest of theirs

The sums have the size of the feature space, not of the sequence (`chunked/halves.py`). This file has the numerics, and
says what it needs of the others as `Parts`; who they are is no matter here (`klformer/distributed`).

A product is begun with the keys and ended with the queries: what brings sums together can be under way while the
queries are made, and their gradients while those of the queries are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.chunked import causal as causal_product
from klformer.ops.spectral_product.chunked import halves
from klformer.ops.spectral_product.chunked.block import Carried
from klformer.ops.spectral_product.chunked.tiling import causal_cut, cut
from klformer.ops.spectral_product.key_values import NO_KEY
from klformer.ops.spectral_product.operands import SpectralKernel, SpectralOperands
from klformer.ops.transforms import is_transformed

#: Gives a result that was begun; to be called once.
Pending = Callable[[], Tensor]


class Parts(ABC):
    """Those who have the parts of a sequence, one part each, in the order of the sequence.

    Every method is called by all of them, in the same order. Those that are differentiable take the loss to be the sum
    of everybody's.
    """

    #: Which part is here, of how many.
    index: int
    count: int

    @abstractmethod
    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum; no gradient."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """Everybody's x, (count, *x.shape); no gradient."""

    @abstractmethod
    def begin_sum(self, x: Tensor) -> Pending:
        """Begin the sum of everybody's x. Differentiable."""

    @abstractmethod
    def begin_combination(self, x: Tensor, factors: Tensor, of_others: Tensor) -> Pending:
        """Begin sum_p factors_p x_p over the parts p. Differentiable in x.

        Args:
            factors: (count, ...), broadcastable to x.
            of_others: (count, ...), those that the others have for this part: gradients come back with them.
        """

    def begin_before(self, sums: Tensor, shift: Tensor, *, exponential: bool) -> tuple[Pending, Tensor]:
        """Begin to bring together the sums of the parts before this one, and say what they will refer to.

        Args:
            sums: Of this part, relative to `shift` (n, 1, .); features last if shifts are of features.
            exponential: Shifts are to base 2.
        """
        before, factors, of_others = _factors_before(self.gather(shift), self.index, exponential)
        return self.begin_combination(sums, factors, of_others), before

    def sum(self, x: Tensor) -> Tensor:
        """The sum of everybody's x. Differentiable."""
        return self.begin_sum(x)()

    def lengths(self, length: int, device: torch.device) -> Tensor:
        """How long the parts are, (count,)."""
        return self.gather(torch.tensor(length, device=device))

    def first_position(self, length: int, device: torch.device) -> Tensor:
        """Where a part of this length begins in the whole sequence, ()."""
        return self.lengths(length, device)[: self.index].sum()


class Past(Parts):
    """A causal sequence whose parts come one after the other, to one process: each sees the sums of those before.

    For inference. `num_tokens` are those of the parts that are done; who gives the parts counts them.
    """

    index, count = 1, 2

    def __init__(self) -> None:
        self.num_tokens = 0
        self._sums: tuple[Tensor, Tensor] | None = None

    def begin_before(self, sums: Tensor, shift: Tensor, *, exponential: bool) -> tuple[Pending, Tensor]:
        if self._sums is None:
            self._sums = torch.zeros_like(sums), torch.full_like(shift, NO_KEY)
        past, of_past = self._sums
        if not shift.shape[2]:
            self._sums = past + sums, shift
        else:
            largest = torch.maximum(of_past, shift)
            old, new = _power(of_past - largest, exponential), _power(shift - largest, exponential)
            self._sums = past * old + sums * new, largest
        return (lambda: past), of_past

    def lengths(self, length: int, device: torch.device) -> Tensor:
        return torch.tensor([self.num_tokens, length], device=device)

    def largest(self, x: Tensor) -> Tensor:
        self._refuse()

    def gather(self, x: Tensor) -> Tensor:
        self._refuse()

    def begin_sum(self, x: Tensor) -> Pending:
        self._refuse()

    def begin_combination(self, x: Tensor, factors: Tensor, of_others: Tensor) -> Pending:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ArgumentError("parts that come one after the other see those before only: the attention must be causal")


class PartProduct:
    """Attention of the queries of this part to the keys of all parts, or if causal to those before each query.

    Args:
        kernel: As in `SpectralOperands`, likewise what follows.
        k: Keys of this part (B, H, S, D); S may be 0, and differ from part to part.
        v: Values of this part (B, H, S, E).
        key_mask: (B or 1, H or 1, S), True = keep.
        key_bias: (B or 1, H or 1, S); all parts have some or none.
        causal: Query i sees keys 0 .. i of its own part, and all of those before.
        parts: The others.
    """

    def __init__(
        self,
        kernel: SpectralKernel,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None,
        key_bias: Tensor | None,
        causal: bool,
        parts: Parts,
    ) -> None:
        self._operands = SpectralOperands(
            kernel, k[:, :, :0], k, v, key_mask=key_mask, key_bias=key_bias, causal=causal
        )
        named = self._operands.tensors()
        if is_transformed(*named.values()):
            _refuse_transforms()
        self._exponential = kernel.feature_map.exponential
        state, total, shift = _Absorb.apply(*_packed(self._operands))  # type: ignore[no-untyped-call]
        if causal:
            self._pending, self._shift = parts.begin_before(_flat(state, total), shift, exponential=self._exponential)
        else:
            self._shift = parts.largest(shift) if shift.shape[2] else shift
            factor = _power(shift - self._shift, self._exponential) if shift.shape[2] else shift.new_ones(1, 1, 1)
            self._pending = parts.begin_sum(_flat(state * factor, total if self._exponential else total * factor))
        self._shapes = state.shape[1:], total.shape[1:]

    def read(self, q: Tensor) -> Tensor:
        """The results (B, H, L, E) of the queries (B, H, L, D); if causal there are as many as keys."""
        own = self._operands
        together = self._pending().flatten(1)
        split = self._shapes[0].numel()
        state, total = together[:, :split].view(-1, *self._shapes[0]), together[:, split:].unsqueeze(-1)
        if own.causal:
            if q.shape[2] != own.k.shape[2]:
                raise ArgumentError(f"causal needs as many queries as keys, got {q.shape[2]} and {own.k.shape[2]}")
            operands = SpectralOperands(
                own.kernel, q, own.k, own.v, key_mask=own.key_mask, key_bias=own.key_bias, causal=True
            )
        else:
            # Keys without a length: their log-weights are in the sums. The values say how many columns there are.
            none = own.k[:, :, :0].detach(), own.v[:, :, :0].detach()
            operands = SpectralOperands(own.kernel, q, *none)
        apply = _Continue.apply if own.causal else _Read.apply
        out: Tensor = apply(state, total, self._shift, *_packed(operands))  # type: ignore[no-untyped-call]
        return out


def _flat(state: Tensor, total: Tensor) -> Tensor:
    """Sums as one tensor that factors of features (n, 1, R), or of all alike (n, 1, 1), can multiply."""
    if not total.shape[1]:
        return state
    return torch.cat([state.flatten(1), total.flatten(1)], dim=1).unsqueeze(1)


def _power(differences: Tensor, exponential: bool) -> Tensor:
    """By how much sums become smaller that refer to a larger shift; those of exponential maps are to base 2."""
    return differences.exp2() if exponential else differences.exp()


def _factors_before(shifts: Tensor, index: int, exponential: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What the sums before a part refer to, the factors of everybody's sums in them, and those that the others have
    for this part's; shifts (count, n, 1, R or 1 or 0)."""
    count = shifts.shape[0]
    numbers = torch.arange(count, device=shifts.device).view(-1, 1, 1, 1)
    if not shifts.shape[3]:  # sums are plain
        ones = shifts.new_ones(count, 1, 1, 1)
        return shifts[index], ones * (numbers < index), ones * (numbers > index)
    # The first part has nothing before it, and refers to what it likes: its own shift.
    largest = torch.cat([shifts[:1], shifts.cummax(0).values[:-1]])
    factors = _power((shifts - largest[index]).clamp(max=0), exponential).masked_fill(numbers >= index, 0)
    of_others = _power((shifts[index] - largest).clamp(max=0), exponential).masked_fill(numbers <= index, 0)
    before = largest[index] if index else torch.full_like(largest[0], NO_KEY)
    return before, factors, of_others


def _refuse_transforms() -> NoReturn:
    raise ArgumentError(
        "a sequence in parts has first derivatives by backward() and nothing else: forward-mode derivatives and "
        "torch.func's transforms are for a whole sequence"
    )


def _packed(operands: SpectralOperands) -> tuple[Any, ...]:
    """Operands as arguments of an autograd function."""
    named = operands.tensors()
    return ",".join(named), operands.map_code, operands.causal, *named.values()


def _opened(names: str, map_code: str, causal: bool, tensors: Sequence[Tensor]) -> SpectralOperands:
    return SpectralOperands.from_tensors(names.split(","), tensors, map_code, causal=causal)


def _needed(ctx: Any, first: int) -> list[str]:
    """The names of the operands whose gradients are wanted; they are the arguments from `first` on."""
    return [name for name, wanted in zip(ctx.names.split(","), ctx.needs_input_grad[first:], strict=True) if wanted]


def _of_arguments(ctx: Any, operands: SpectralOperands, found: dict[str, Tensor], first: int) -> list[Tensor | None]:
    """Gradients in the order of the arguments."""
    needed = _needed(ctx, first)
    return [found[name].to(x.dtype) if name in needed else None for name, x in operands.tensors().items()]


class _Absorb(torch.autograd.Function):
    """Keys and values into sums: (state, total, shift)."""

    @staticmethod
    def forward(ctx: Any, names: str, map_code: str, causal: bool, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        operands = _opened(names, map_code, causal, tensors)
        with full_precision(operands.k):
            sums, key_bias = halves.absorb(operands, cut(operands))
        ctx.names, ctx.map_code, ctx.causal = names, map_code, causal
        ctx.save_for_backward(sums.shift, key_bias, *tensors)
        ctx.mark_non_differentiable(sums.shift)
        return sums.state, sums.total, sums.shift

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_state: Tensor, d_total: Tensor, _: Any) -> tuple[Any, ...]:
        shift, key_bias, *tensors = ctx.saved_tensors
        operands = _opened(ctx.names, ctx.map_code, ctx.causal, tensors)
        d_sums = Carried(d_state, d_total, shift)
        with full_precision(d_state):
            found = halves.absorb_backward(operands, shift, key_bias, d_sums, _needed(ctx, 3), cut(operands))
        return None, None, None, *_of_arguments(ctx, operands, found, 3)


class _Read(torch.autograd.Function):
    """Queries against sums."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, total: Tensor, shift: Tensor, names: str, map_code: str, causal: bool, *tensors: Tensor
    ) -> Tensor:
        operands = _opened(names, map_code, causal, tensors)
        with full_precision(operands.q):
            out, divisor = halves.read(operands, Carried(state, total, shift), cut(operands))
        ctx.names, ctx.map_code, ctx.causal = names, map_code, causal
        ctx.save_for_backward(state, total, shift, out, divisor, *tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        state, total, shift, out, divisor, *tensors = ctx.saved_tensors
        operands = _opened(ctx.names, ctx.map_code, ctx.causal, tensors)
        sums = Carried(state, total, shift)
        with full_precision(d_out):
            found, d_sums = halves.read_backward(operands, sums, out, divisor, d_out, _needed(ctx, 6), cut(operands))
        return d_sums.state, d_sums.total, None, None, None, None, *_of_arguments(ctx, operands, found, 6)


class _Continue(torch.autograd.Function):
    """The causal product after what came before."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, total: Tensor, shift: Tensor, names: str, map_code: str, causal: bool, *tensors: Tensor
    ) -> Tensor:
        operands = _opened(names, map_code, causal, tensors)
        with full_precision(operands.q):
            saved = causal_product.forward(operands, causal_cut(operands), Carried(state, total, shift))
        ctx.names, ctx.map_code, ctx.causal = names, map_code, causal
        ctx.save_for_backward(state, total, shift, *saved, *tensors)
        return saved[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        state, total, shift, *rest = ctx.saved_tensors
        tensors = rest[-len(ctx.names.split(",")) :]
        operands = _opened(ctx.names, ctx.map_code, ctx.causal, tensors)
        d_before = Carried(torch.zeros_like(state), torch.zeros_like(total), shift)
        with full_precision(d_out):
            found = causal_product.backward(
                operands, rest[: -len(tensors)], d_out, _needed(ctx, 6), causal_cut(operands), d_before
            )
        return d_before.state, d_before.total, None, None, None, None, *_of_arguments(ctx, operands, found, 6)
