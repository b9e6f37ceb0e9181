"""The steps that the bidirectional and the causal product have in common, and what forward leaves for backward.

Each step works on one chunk of one tile; rows are (batch, head) pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.modulation import demodulate, modulate
from klformer.ops.tiling import Problem, Tile

#: The running maximum before any key was seen. Finite, so that differences of two are numbers, and far below any score.
NO_KEY = -1e30


@dataclass
class Residuals:
    """What forward leaves for backward besides the operands. Rows are (batch, head) pairs, B * H of them."""

    out: Tensor  # (B, H, L, E)
    denominator: Tensor  # (B * H, L, 1), of the shifted features
    state: Tensor  # (copies, B * H, 1, R, W); causal: one for each checkpoint instead of 1
    key_shift: Tensor  # (B * H, 1, R) running maximum of the keys' scores; R = 0 where the map needs none
    query_shift: Tensor  # (B * H, L, 1) maximum of the queries' scores; L = 0 likewise
    slope: Tensor  # (B, H, L, E) derivative of `out` by the query's angle; E = 0 without a tied mean
    starts: Tensor  # (B * H, L) bool: where a causal segment starts; L = 0 where segments are the chunks

    def save_state(self, tile: Tile, carry: "Carry", index: int = 0) -> None:
        """Keep what a tile has carried to a checkpoint."""
        copies = tile.problem.feature_map.copies
        self.state[:, tile.rows, index] = carry.state.view(copies, tile.num_rows, *carry.state.shape[1:])
        self.key_shift[tile.rows, index : index + 1] = carry.shift

    def load_state(self, tile: Tile, index: int = 0) -> tuple[Tensor, Tensor]:
        """State (copies n, R, W), a copy, and the keys' maxima (n, 1, R or 0) at a checkpoint."""
        return self.state[:, tile.rows, index].flatten(0, 1).clone(), self.key_shift[tile.rows, index : index + 1]


@dataclass
class Gradients:
    """Gradients of the operands, in their shapes."""

    q: Tensor
    k: Tensor
    v: Tensor
    omega: Tensor | None
    mean: Tensor | None


@dataclass
class Carry:
    """Everything that is kept of the keys seen so far, for the rows of one tile."""

    state: Tensor  # (copies n, R, W), sum of phi(k) [v, 1]^T
    total: Tensor  # (n, 1, E + 1), sum of [v, 1], for smoothing
    shift: Tensor  # (n, 1, R), the keys' maxima that the state refers to; R = 0 where the map needs none

    @staticmethod
    def before_first(tile: Tile) -> "Carry":
        problem, new_zeros = tile.problem, tile.problem.k.new_zeros
        num_shifts = problem.num_projections if problem.feature_map.exponential else 0
        return Carry(
            state=new_zeros(
                problem.feature_map.copies * tile.num_rows,
                problem.num_projections,
                problem.value_columns,
                dtype=problem.dtype,
            ),
            total=new_zeros(tile.num_rows, 1, problem.v.shape[-1] + 1, dtype=problem.dtype),
            shift=new_zeros(tile.num_rows, 1, num_shifts, dtype=problem.dtype).fill_(NO_KEY),
        )

    def absorb(self, tile: Tile, start: int, stop: int) -> None:
        """Add the keys and values of a chunk, in place."""
        problem = tile.problem
        keys, values = tile.keys(start, stop), tile.values(start, stop)
        scores = tile.key_scores(keys, start, stop)
        if problem.feature_map.exponential:
            self.shift = raise_shift(self.shift, scores, self.state)
            scores -= self.shift
        phi = problem.feature_map.features(scores)
        modulated = problem.feature_map.repeat(modulate(values, tile.angle(keys)))
        self.state.baddbmm_(phi.transpose(1, 2), modulated)
        if problem.smoothing:
            self.total += values.sum(1, keepdim=True)

    def attend(self, tile: Tile, queries: Tensor) -> "Attended":
        """Results of a chunk of queries (n, chunk, D) against all that was absorbed."""
        problem = tile.problem
        scores = problem.feature_map.scores(queries, tile.omega)
        query_shift = None
        if problem.feature_map.exponential:
            query_shift = shift_queries(scores, self.shift)
        phi = problem.feature_map.features(scores)
        product = problem.feature_map.merge(torch.bmm(phi, self.state))
        product, slope = demodulate(product, tile.angle(queries))
        if problem.smoothing:
            product.add_(self.total, alpha=problem.smoothing)
        return Attended.divide(product, slope, query_shift)


@dataclass
class Attended:
    """Results of a chunk of queries."""

    out: Tensor  # (n, chunk, E)
    denominator: Tensor  # (n, chunk, 1)
    slope: Tensor | None  # (n, chunk, E), the derivative of `out` by the angle
    query_shift: Tensor | None  # (n, chunk, 1)

    @staticmethod
    def divide(product: Tensor, slope: Tensor | None, query_shift: Tensor | None) -> "Attended":
        """The quotient of [numerator, denominator]; 0 where there was no key to attend to."""
        numerator, denominator = product[..., :-1], product[..., -1:]
        inverse = reciprocal(denominator)
        out = numerator * inverse
        if slope is not None:
            slope = torch.addcmul(slope[..., :-1], out, slope[..., -1:], value=-1).mul_(inverse)
        return Attended(out, denominator, slope, query_shift)

    def store(self, saved: Residuals, tile: Tile, start: int, stop: int) -> None:
        saved.out.flatten(0, 1)[tile.rows, start:stop] = self.out
        saved.denominator[tile.rows, start:stop] = self.denominator
        if self.slope is not None:
            saved.slope.flatten(0, 1)[tile.rows, start:stop] = self.slope
        if self.query_shift is not None:
            saved.query_shift[tile.rows, start:stop] = self.query_shift


def raise_shift(shift: Tensor, scores: Tensor, state: Tensor) -> Tensor:
    """The running maximum after a chunk of key scores; `state` is rescaled in place to refer to it."""
    raised = torch.maximum(shift, scores.amax(1, keepdim=True))
    state.mul_((shift - raised).exp_().transpose(1, 2))
    return raised


def shift_queries(scores: Tensor, key_shift: Tensor) -> Tensor:
    """Add the keys' maxima to the queries' scores and subtract their own maximum, in place; returns the latter."""
    scores += key_shift
    query_shift = scores.amax(-1, keepdim=True)
    scores -= query_shift
    return query_shift


def divide_vjp(d_out: Tensor, out: Tensor, denominator: Tensor) -> Tensor:
    """Gradient of [numerator, denominator], (n, chunk, E + 1)."""
    inverse = reciprocal(denominator)
    d_product = d_out.new_empty(*d_out.shape[:-1], d_out.shape[-1] + 1)
    torch.mul(d_out, inverse, out=d_product[..., :-1])
    torch.mul((d_out * out).sum(-1, keepdim=True), -inverse, out=d_product[..., -1:])
    return d_product


def reciprocal(denominator: Tensor) -> Tensor:
    """1 / denominator, and 0 for a query that had no key to attend to."""
    return denominator.reciprocal().masked_fill_(denominator == 0, 0)


def query_features(tile: Tile, queries: Tensor, key_shift: Tensor, query_shift: Tensor) -> Tensor:
    """The features that forward used for these queries."""
    scores = tile.problem.feature_map.scores(queries, tile.omega)
    if tile.problem.feature_map.exponential:
        scores.add_(key_shift).sub_(query_shift)
    return tile.problem.feature_map.features(scores)


def key_features(tile: Tile, keys: Tensor, shift: Tensor, start: int, stop: int) -> Tensor:
    """The features of these keys that refer to the maximum `shift`."""
    scores = tile.key_scores(keys, start, stop)
    if tile.problem.feature_map.exponential:
        scores.sub_(shift)
    return tile.problem.feature_map.features(scores)


def product_gradient(
    tile: Tile, d_out: Tensor, saved: Residuals, start: int, stop: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients of [numerator, denominator] (n, chunk, E + 1) and of the queries' angles (n, chunk, 1)."""
    d_quotient = tile.chunk(d_out, start, stop)
    denominator = saved.denominator[tile.rows, start:stop]
    d_product = divide_vjp(d_quotient, tile.chunk(saved.out, start, stop), denominator)
    if tile.mean is None:
        return d_product, None
    return d_product, (d_quotient * tile.chunk(saved.slope, start, stop)).sum(-1, keepdim=True)


def store_values(tile: Tile, target: Tensor, d_values: Tensor, start: int, stop: int) -> None:
    """Write the gradients of a chunk of values; padding gets exactly 0."""
    dropped = tile.dropped(start, stop)
    if dropped is not None:
        d_values = d_values.masked_fill(dropped, 0)
    target.flatten(0, 1)[tile.rows, start:stop] = d_values[..., :-1]


class ParameterGradients:
    """Writes the gradients of queries and keys, and adds up those of the frequencies and the tied mean on the way."""

    def __init__(self, tile: Tile, need_omega: bool) -> None:
        self.tile = tile
        self._omega = torch.zeros_like(tile.omega) if need_omega and tile.omega is not None else None  # (n, R, D)
        self._mean = torch.zeros_like(tile.mean) if tile.mean is not None else None  # (n, 1, D)

    def store_queries(
        self, target: Tensor, x: Tensor, d_scores: Tensor, d_angle: Tensor | None, start: int, stop: int
    ) -> None:
        d_x = self.tile.problem.feature_map.inputs_vjp(d_scores, self.tile.omega)
        self._store(target, x, d_x, d_scores, d_angle, start, stop)

    def store_keys(
        self, target: Tensor, x: Tensor, d_scores: Tensor, d_angle: Tensor | None, start: int, stop: int
    ) -> None:
        d_x = self.tile.problem.feature_map.key_inputs_vjp(x, d_scores, self.tile.omega)
        self._store(target, x, d_x, d_scores, d_angle, start, stop)

    def _store(
        self, target: Tensor, x: Tensor, d_x: Tensor, d_scores: Tensor, d_angle: Tensor | None, start: int, stop: int
    ) -> None:
        if self._omega is not None:
            self._omega.baddbmm_(d_scores.transpose(1, 2), x)
        if d_angle is not None and self.tile.mean is not None and self._mean is not None:
            d_x = d_x.addcmul(d_angle, self.tile.mean)
            self._mean.baddbmm_(d_angle.transpose(1, 2), x)
        target.flatten(0, 1)[self.tile.rows, start:stop] = d_x

    def finish(self, grads: Gradients) -> None:
        if self._omega is not None and grads.omega is not None:
            self.tile.add_to_parameter(grads.omega, self._omega)
        if self._mean is not None and grads.mean is not None:
            self.tile.add_to_parameter(grads.mean, self._mean.squeeze(1))


def empty_residuals(problem: Problem, *, num_states: int) -> Residuals:
    """Uninitialised residuals of the right shapes; `num_states` states a row."""
    batch, heads, length, _ = problem.q.shape
    rows, num_values = batch * heads, problem.v.shape[-1]
    exponential, tied = problem.feature_map.exponential, problem.mean is not None

    def empty(*shape: int, dtype: torch.dtype = problem.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=problem.q.device)

    return Residuals(
        out=empty(batch, heads, length, num_values, dtype=problem.v.dtype),
        denominator=empty(rows, length, 1),
        state=empty(problem.feature_map.copies, rows, num_states, problem.num_projections, problem.value_columns),
        key_shift=empty(rows, num_states, problem.num_projections if exponential else 0),
        query_shift=empty(rows, length if exponential else 0, 1),
        slope=empty(batch, heads, length, num_values if tied else 0),
        starts=empty(rows, 0, dtype=torch.bool),
    )


def empty_gradients(problem: Problem, need_omega: bool) -> Gradients:
    """Gradients to be filled: those of the sequences uninitialised, those of the parameters zero."""
    return Gradients(
        q=torch.empty(problem.q.shape, dtype=problem.q.dtype, device=problem.q.device),
        k=torch.empty(problem.k.shape, dtype=problem.k.dtype, device=problem.q.device),
        v=torch.empty(problem.v.shape, dtype=problem.v.dtype, device=problem.q.device),
        omega=None
        if problem.omega is None or not need_omega
        else torch.zeros(problem.omega.shape, dtype=problem.dtype, device=problem.q.device),
        mean=None
        if problem.mean is None
        else torch.zeros(problem.mean.shape, dtype=problem.dtype, device=problem.q.device),
    )
