"""One block of the causal product: m chunks of c tokens of n rows, worked on as n m matrices.

    pairs_ji = phi(k_j).phi(q_i) for j <= i in the same chunk, otherwise 0
    [numerator, denominator] = state phi(q) + [v, 1] pairs
    state of the next chunk = factor (state + [v, 1] phi(k)^T)

The factor is by how much a state becomes smaller where it refers to a larger shift.
"""

import math

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked import floor
from klformer.ops.spectral_product.chunked.carried import Carried
from klformer.ops.spectral_product.chunked.exponential import LN_2, LOG2_E, log2_sum, store_keys
from klformer.ops.spectral_product.chunked.features import (
    angle,
    frequency_weights,
    log_of,
    quotient_vjp,
    reciprocal,
    weighted_values,
)
from klformer.ops.spectral_product.chunked.gradients import TileGradients
from klformer.ops.spectral_product.chunked.memory import borrow
from klformer.ops.spectral_product.chunked.pair_offset import demodulate, modulate, turned
from klformer.ops.spectral_product.chunked.tiles import Tile
from klformer.ops.spectral_product.operands import NO_KEY

#: Log-weights of keys may rise by so much inside a chunk: exp(-40) is far above the smallest number.
MAX_RISE = 40.0


class Block:
    """Features and states of a block.

    Args:
        tile: The rows.
        start: First token.
        stop: Token after the last; a multiple of `chunk` after the first, or not more than one chunk.
        chunk: Tokens c of a chunk.
        carried: What comes before.
        query_shift: The largest score of each query (n, T, 1), if it is known.
        with_queries: Whether anything will be read; otherwise only states are made.
    """

    def __init__(
        self,
        tile: Tile,
        start: int,
        stop: int,
        chunk: int,
        carried: Carried,
        *,
        query_shift: Tensor | None = None,
        with_queries: bool = True,
    ) -> None:
        self.tile, self.start, self.stop = tile, start, stop
        length = stop - start
        self.chunk = min(chunk, length)
        self.num_chunks = length // self.chunk
        self.query_shift = query_shift
        #: With a simplex envelope R times the features of a key, which sum to one, (n, T, R).
        self._shares: Tensor | None = None
        self.keys, self._values = tile.keys(start, stop), tile.values(start, stop)
        self._bias = tile.log_weights(self.keys, start, stop)
        self._absorb(carried)
        if with_queries:
            self.queries = tile.queries(start, stop)
            self.phi_q = self._batch(self._query_features())

    # Keys and states.

    def _absorb(self, carried: Carried) -> None:
        """Make features of the keys, and the states before the chunks."""
        weights = None
        if self.tile.feature_map.exponential:
            by_chunk = self._by_chunk(self._key_scores())  # (n, m, c, R)
            self.shift = torch.maximum(by_chunk.amax(2).cummax(1).values, carried.shift)  # (n, m, R)
            phi = by_chunk.sub_(self.shift.unsqueeze(2)).exp2_().flatten(1, 2)
        else:
            self.shift, weights = self._weights(carried.shift)
            phi = self._features(self.keys, "phi_k")
        self.weights = None if weights is None else self._batch(weights).transpose(1, 2)  # (n m, 1, c)
        self.phi_k = self._batch(phi)
        self.key_angle = self._angle(self.keys)
        self.values = weighted_values(self._batch(self._values), self.weights)  # (n m, E + 1, c)
        self.modulated = modulate(self.values, self.key_angle)  # (n m, W, c)
        added = self._by_row(self._multiply("added", self.modulated, self.phi_k))  # (n, m, W, F)
        self._factors = self._state_factors(carried.shift)
        self.states, state_after = self._scan("states", added, carried.state)
        self.totals, total_after = carried.total, carried.total
        if self.tile.smoothing is not None:
            added = self._by_row(self.values.sum(-1, keepdim=True))
            self.totals, total_after = self._scan("totals", added, carried.total)  # (n m, E + 1, 1)
        self.after = Carried(state_after, total_after, self.shift[:, -1:])

    def _key_scores(self) -> Tensor:
        scores = self._project(self.keys, "phi_k")
        if self.tile.call.kernel.simplex:
            spare = self._memory("shares", *scores.shape)
            scores -= log2_sum(scores, spare).sub_(math.log2(scores.shape[2]))
            self._shares = torch.exp2(scores, out=spare)
        return scores if self._bias is None else scores.add_(self._bias * LOG2_E)

    def _weights(self, shift: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return shifts (n, m, 1) and weights (n, T, 1) of keys of a map that is not exponential; None for all 1."""
        if self._bias is None and self.tile.call.sums is None:
            return torch.zeros_like(shift).expand(-1, self.num_chunks, 1), None
        bias = self.tile.new_zeros(self.stop - self.start, 1) if self._bias is None else self._bias
        by_chunk = self._by_chunk(bias)
        shift = torch.maximum(by_chunk.amax(2).cummax(1).values, shift)
        return shift, (by_chunk - shift.unsqueeze(2)).exp_().flatten(1, 2)

    def _state_factors(self, before: Tensor) -> Tensor | None:
        """Return by how much the state becomes smaller at each chunk, (n, m, 1, R or 1); None where it does not."""
        exponential = self.tile.feature_map.exponential
        if not exponential and self.weights is None:
            return None
        differences = torch.cat([before, self.shift[:, :-1]], dim=1) - self.shift
        return (differences.exp2_() if exponential else differences.exp_()).unsqueeze(2)

    def _scan(self, use: str, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk, (n m, ...), and the one after the last, given what each adds
        (n, m, ...), which is overwritten."""
        if self._adds_at_once(added):
            states = torch.cat([state.unsqueeze(1), added[:, :-1]], dim=1).cumsum(1)
            return states.flatten(0, 1), states[:, -1] + added[:, -1]
        states, factors = self._memory(use, *added.shape), self._factors
        by_chunk, additions = states.unbind(1), added.unbind(1)
        if factors is None:
            by_chunk[0].copy_(state)
            for index in range(1, self.num_chunks):
                torch.add(by_chunk[index - 1], additions[index - 1], out=by_chunk[index])
        else:
            by_factor = factors.unbind(1)
            torch.mul(state, by_factor[0], out=by_chunk[0])
            added[:, :-1].mul_(factors[:, 1:])
            for index in range(1, self.num_chunks):
                torch.addcmul(additions[index - 1], by_chunk[index - 1], by_factor[index], out=by_chunk[index])
        return states.flatten(0, 1), by_chunk[-1] + additions[-1]

    def _scan_back(self, use: str, d_read: Tensor, d_after: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states after each chunk (n m, ...), and of the one before all; `d_read`
        (n m, ...) is that which comes from reading the state before each chunk, and is overwritten."""
        d_read = self._by_row(d_read)
        if self._adds_at_once(d_read):
            sums = torch.cat([d_after.unsqueeze(1), d_read.flip(1)], dim=1).cumsum(1)  # of the last chunk first
            return sums[:, :-1].flip(1).flatten(0, 1), sums[:, -1]
        d_states, factors = self._memory(use, *d_read.shape), self._factors
        by_chunk, reads = d_states.unbind(1), d_read.unbind(1)
        by_factor = None if factors is None else factors.unbind(1)
        if factors is not None:
            d_read.mul_(factors)
        by_chunk[-1].copy_(d_after)
        for index in reversed(range(self.num_chunks)):
            out = by_chunk[index - 1] if index else None
            if by_factor is None:
                d_after = torch.add(reads[index], by_chunk[index], out=out)
            else:
                d_after = torch.addcmul(reads[index], by_chunk[index], by_factor[index], out=out)
        return d_states.flatten(0, 1), d_after

    def _adds_at_once(self, states: Tensor) -> bool:
        """Whether states are added up by one call: where a call costs more than adding, and nothing is multiplied."""
        return self._factors is None and (states.shape[-1] == 1 or states.device.type != "cpu")

    def _memory(self, use: str, *shape: int) -> Tensor:
        """Uninitialised memory; the next block overwrites it."""
        return borrow(f"causal {use}", shape, self.tile.call.tokens, self.tile.dtype)

    def _multiply(self, use: str, left: Tensor, right: Tensor) -> Tensor:
        """The product of two batches of matrices, in memory that the next block overwrites."""
        return torch.bmm(left, right, out=self._memory(use, left.shape[0], left.shape[1], right.shape[2]))

    def _totals_of_queries(self) -> Tensor:
        """The sum of the weighted values that each query sees, (n m, E + 1, c)."""
        return self.values.cumsum(-1).add_(self.totals)

    # Features.

    def _project(self, x: Tensor, use: str) -> Tensor:
        """Return scores (n, T, R), to base 2 where the map is exponential; inputs themselves without frequencies."""
        omega = self.tile.omega
        if omega is None:
            return x.clone()
        omega = omega * LOG2_E if self.tile.feature_map.exponential else omega
        return self.tile.project(x, omega, self._memory(use, *x.shape[:2], omega.shape[1]))

    def _features(self, x: Tensor, use: str) -> Tensor:
        """Return those of a map that is not exponential, (n, T, F)."""
        phi = self._memory(use, *x.shape[:2], self.tile.call.num_features)
        return self.tile.feature_map.features(self._project(x, "scores"), phi, dim=-1)

    def _query_features(self) -> Tensor:
        """Return features (n, T, F), times the frequencies' weights."""
        tile = self.tile
        if not tile.feature_map.exponential:
            phi = self._features(self.queries, "phi_q")
            weights = frequency_weights(tile)
            return phi if weights is None else phi.mul_(weights)
        scores = self._project(self.queries, "phi_q")
        reference = self.shift if tile.frequency_bias is None else self.shift + tile.frequency_bias * LOG2_E
        self._by_chunk(scores).add_(reference.unsqueeze(2))
        if self.query_shift is None:
            self.query_shift = scores.amax(-1, keepdim=True)
        return scores.sub_(self.query_shift).exp2_()

    def _angle(self, x: Tensor) -> Tensor | None:
        """(n m, 1, c) of x (n, T, D)."""
        angles = angle(self.tile, x)
        return None if angles is None else self._batch(angles.transpose(1, 2)).transpose(1, 2)

    def _batch(self, x: Tensor) -> Tensor:
        """(n, T, .) -> (n m, c, .)."""
        return x.reshape(-1, self.chunk, x.shape[-1])

    def _by_chunk(self, x: Tensor) -> Tensor:
        """(n, T, .) -> (n, m, c, .)."""
        return x.view(x.shape[0], self.num_chunks, self.chunk, x.shape[-1])

    def _by_row(self, x: Tensor) -> Tensor:
        """(n m, ., .) -> (n, m, ., .)."""
        return x.view(-1, self.num_chunks, *x.shape[1:])

    def _unbatch(self, x: Tensor) -> Tensor:
        """(n m, ., c) -> (n, T, .)."""
        return x.transpose(1, 2).reshape(-1, self.stop - self.start, x.shape[1])

    # Results.

    def _product(self) -> tuple[Tensor, Tensor]:
        """Return [numerator, denominator], still modulated, (n m, W, c), and the pairs (n m, c keys, c queries)."""
        pairs = self._pairs()
        product = self._multiply("product", self.states, self.phi_q.transpose(1, 2))
        return product.baddbmm_(self.modulated, pairs), pairs

    def attend(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return results (n, T, E), denominators (n, T) before `floor` adds to them, and log-sums (n, T)."""
        product = demodulate(self._product()[0], self._angle(self.queries))
        denominator = product[:, -1:]
        if self.tile.smoothing is not None:
            totals, smoothing = self._totals_of_queries(), self._smoothing()
            product.addcmul_(totals, smoothing)
            denominator = denominator.clone()
            floor.raised(product, totals, smoothing)
        out = product[:, :-1] * reciprocal(product[:, -1:])
        divisor, scale = self._unbatch(product[:, -1:]), self.query_shift
        scale = self._by_token(self.shift) if scale is None else scale * LN_2
        log_sum = log_of(divisor, scale, self.tile.call.kernel.log_normaliser)
        return self._unbatch(out), self._unbatch(denominator).squeeze(-1), log_sum.squeeze(-1)

    def _by_token(self, x: Tensor) -> Tensor:
        """(n, m, 1) -> (n, T, 1)."""
        return x.repeat_interleave(self.chunk, dim=1)

    def _smoothing(self) -> Tensor:
        """Return (n m, 1, 1)."""
        assert self.tile.smoothing is not None
        return self.tile.smoothing.repeat_interleave(self.num_chunks, dim=0)

    def loses(self, denominator: Tensor, carried: Carried) -> Tensor:
        """Return whether terms of a result may have been lost, a bool tensor; denominators (n, T)."""
        if self.tile.feature_map.exponential:
            tiny = denominator < torch.finfo(denominator.dtype).tiny ** 0.5
            dropped = self.tile.dropped(self.start, self.stop)
            if dropped is not None:
                some_key = (carried.shift[..., :1] > NO_KEY / 2) | (~dropped).cumsum(1).bool()
                tiny &= some_key.squeeze(-1)
            return tiny.any()
        if self._bias is None:
            return torch.zeros((), dtype=torch.bool, device=denominator.device)
        so_far = self._by_chunk(torch.maximum(self._bias.cummax(1).values, carried.shift))
        # Where there was no key yet, there is nothing to lose.
        return ((so_far[:, :, -1:] - so_far > MAX_RISE) & (so_far > NO_KEY / 2)).any()

    # Gradients.

    def backward(
        self,
        collect: TileGradients,
        *,
        d_out: Tensor | None,
        d_log_sum: Tensor | None,
        out: Tensor,
        denominator: Tensor,
        d_after: Carried,
    ) -> Carried:
        """Write the gradients of the block; return that of what was carried into it.

        Args:
            collect: Where they go.
            d_out: Gradient of the results, (n, T, E); None for zero.
            d_log_sum: Gradient of the log-sums, (n, T); None for zero.
            out: All results as they were given, (B, H, L, E).
            denominator: What `attend` gave, (n, T).
            d_after: Gradient of what the block carries on.
        """
        query_angle = self._angle(self.queries)
        denominator, totals, smoothing = denominator.reshape(-1, 1, self.chunk), self.after.total, None
        if self.tile.smoothing is not None:
            totals, smoothing = self._totals_of_queries(), self._smoothing()
        # A result that was rounded is made again.
        rounded = out.dtype != denominator.dtype
        quotient = self.attend()[0] if rounded else self.tile.chunk(out, self.start, self.stop)
        d_product, raised = quotient_vjp(
            denominator,
            totals,
            smoothing,
            self._batch(quotient),
            None if d_out is None else self._batch(d_out),
            None if d_log_sum is None else d_log_sum.reshape(-1, self.chunk),
        )
        d_modulated = modulate(d_product, query_angle)  # (n m, W, c)

        product, pairs = (None, self._pairs()) if query_angle is None else self._product()
        d_angle = None
        if query_angle is not None and product is not None:
            d_angle = self._unbatch((d_product * turned(product, query_angle)).sum(1, keepdim=True)).transpose(1, 2)
        d_pairs = self._multiply("d_pairs", self.modulated.transpose(1, 2), d_modulated).triu_()
        d_read = self._multiply("d_read", d_modulated, self.phi_q)
        d_states, d_before = self._scan_back("d_states", d_read, d_after.state)  # (n m, W, F)

        d_weighted = torch.bmm(d_states, self.phi_k.transpose(1, 2)).baddbmm_(d_modulated, pairs.transpose(1, 2))
        d_values, d_total = demodulate(d_weighted, self.key_angle), d_after.total  # (n m, E + 1, c)
        if smoothing is not None:
            d_totals, d_total = self._smoothing_vjp(collect, d_product, raised, d_total)
            d_values += d_totals
        d_phi_q = self._multiply("d_phi", d_modulated.transpose(1, 2), self.states)
        self._store_queries(collect, d_phi_q.baddbmm_(d_pairs.transpose(1, 2), self.phi_k), d_angle)
        d_phi_k = self._multiply("d_phi", self.modulated.transpose(1, 2), d_states)
        self._store_keys(collect, d_phi_k.baddbmm_(d_pairs, self.phi_q), d_values, d_weighted)
        return Carried(d_before, d_total, d_after.shift)

    def _smoothing_vjp(
        self, collect: TileGradients, d_product: Tensor, raised: tuple[Tensor, Tensor] | None, d_after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weighted values (n m, E + 1, c) and of the total before the block, (n, E + 1, 1).

        Args:
            collect: Where the gradient of the smoothing goes.
            d_product: (n m, E + 1, c).
            raised: What `floor.raised_vjp` gives.
            d_after: Of the total after the block, (n, E + 1, 1).
        """
        if collect.smoothing is not None:
            by_chunk = (d_product * self._totals_of_queries()).sum((1, 2))
            if raised is not None:
                by_chunk += raised[1].sum((1, 2))
            collect.smoothing += by_chunk.view(self.tile.num_rows, self.num_chunks).sum(1)[:, None, None]
        d_product = d_product * self._smoothing()
        if raised is not None:
            d_product += raised[0]
        # Every key is in the totals of its own and all later queries. Added up from the end: a difference of two sums
        # would lose the later ones beside larger earlier ones.
        from_here = d_product.flip(-1).cumsum(-1).flip(-1)
        d_totals, d_before = self._scan_back("d_totals", from_here[..., :1].clone(), d_after)
        return from_here.add_(d_totals), d_before

    def _pairs(self) -> Tensor:
        return self._multiply("pairs", self.phi_k, self.phi_q.transpose(1, 2)).triu_()

    def _d_scores(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        """Return the gradient of the scores (n, T, R) of features and their gradient, (n m, c, F) both."""
        d_scores = self.tile.feature_map.vjp(phi, d_phi, dim=-1)
        return d_scores.reshape(-1, self.stop - self.start, d_scores.shape[-1])

    def _store_queries(self, collect: TileGradients, d_phi: Tensor, d_angle: Tensor | None) -> None:
        tile, exponential = self.tile, self.tile.feature_map.exponential
        if collect.frequency_bias is not None and not exponential:
            by_feature = (self.phi_q * d_phi).view(tile.num_rows, -1, d_phi.shape[-1]).sum(1)
            by_part = by_feature.view(tile.num_rows, tile.feature_map.parts, -1)
            collect.frequency_bias += by_part.sum(1, keepdim=True)
        d_scores = self._d_scores(self.phi_q, d_phi)
        if collect.frequency_bias is not None and exponential:
            collect.frequency_bias += d_scores.sum(1, keepdim=True)
        collect.store_inputs("q", self.start, self.stop, self.queries, d_scores, d_angle=d_angle)

    def _store_keys(self, collect: TileGradients, d_phi: Tensor, d_values: Tensor, d_weighted: Tensor) -> None:
        tile, d_angle = self.tile, None
        d_scores = self._d_scores(self.phi_k, d_phi)
        if tile.feature_map.exponential:
            store_keys(collect, self.keys, d_scores, self._shares, self.start, self.stop)
        else:
            if self.key_angle is not None:
                turns = (self.values * turned(d_weighted, self.key_angle)).sum(1, keepdim=True)
                d_angle = self._unbatch(turns).transpose(1, 2)
            if collect.key_bias is not None:
                by_key = self._unbatch((d_values * self.values).sum(1, keepdim=True))
                tile.add_to_keys(collect.key_bias, by_key, self.start, self.stop)
            collect.store_inputs("k", self.start, self.stop, self.keys, d_scores, d_angle=d_angle)
        d_kept = d_values[:, :-1] if self.weights is None else d_values[:, :-1] * self.weights
        d_kept = self._unbatch(d_kept)
        dropped = tile.dropped(self.start, self.stop)
        if dropped is not None:
            d_kept = d_kept.masked_fill_(dropped, 0)  # padding gets exactly 0
        collect.write("v", self.start, self.stop, d_kept)
