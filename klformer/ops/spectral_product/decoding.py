"""Decoding: tokens are added to a state of fixed size, which answers queries at the same cost at any position.

The same arithmetic as the product over a whole sequence, one call at a time, for inference: no gradients flow through a
state. `PreparedKernel` holds what does not change from token to token; make it once for a generation. Frequencies are
shared by all sequences of a batch and never copied. A state is changed in place: clone it to keep it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.feature_maps import FeatureMap
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.chunked.positive import LOG2_E
from klformer.ops.spectral_product.key_values import NO_KEY, KeyValueState
from klformer.ops.spectral_product.operands import FLOOR, SpectralKernel

#: Tokens of a prompt that are worked on at a time.
PROMPT_CHUNK = 256


@dataclass(frozen=True)
class PreparedKernel:
    """A kernel in the form that a step needs."""

    kernel: SpectralKernel
    num_heads: int
    head_dim: int
    like: Tensor  # empty, with the device and the precision of states
    omega: Tensor | None  # (H or 1, D, R) in the unit of the scores
    pair_offset: Tensor | None  # (H or 1, D, 1)
    frequency_bias: Tensor | None  # (H or 1, 1, R); to base 2 for exponential maps, else the weights (H or 1, 1, F)
    smoothing: Tensor | None  # (H or 1, 1, 1), times R

    @staticmethod
    @torch.no_grad()
    def of(kernel: SpectralKernel, *, num_heads: int, head_dim: int, like: Tensor) -> "PreparedKernel":
        """For states on the device of `like` and at least in its precision."""
        like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
        fmap, omega, bias = kernel.feature_map, kernel.omega, kernel.frequency_bias
        if omega is not None:
            omega = omega.to(like.dtype)
            unit = LOG2_E if fmap.exponential else fmap.unit(omega)
            omega = (omega * unit).transpose(1, 2).contiguous()
        if bias is not None:
            bias = bias.to(like.dtype)
            bias = (bias * LOG2_E if fmap.exponential else bias.exp().repeat(1, fmap.parts)).unsqueeze(1)
        smoothing = kernel.smoothing
        if smoothing is not None and omega is not None:
            smoothing = (smoothing.to(like.dtype) * omega.shape[2])[:, None, None]
        offset = None if kernel.pair_offset is None else kernel.pair_offset.to(like.dtype).unsqueeze(-1)
        return PreparedKernel(kernel, num_heads, head_dim, like, omega, offset, bias, smoothing)

    @property
    def feature_map(self) -> FeatureMap:
        return self.kernel.feature_map

    def initial_state(self, batch_size: int, value_dim: int) -> KeyValueState:
        """The state before the first key."""
        rows, num_scores = batch_size * self.num_heads, self.head_dim if self.omega is None else self.omega.shape[2]
        columns = (value_dim + 1) * (1 if self.pair_offset is None else 2)
        zeros = self.like.new_zeros
        return KeyValueState(
            product=zeros(rows, self.feature_map.parts * num_scores, columns),
            total=zeros(rows, 1, value_dim + 1),
            shift=zeros(rows, 1, num_scores if self.feature_map.exponential else 1).fill_(NO_KEY),
        )

    @torch.no_grad()
    def shifted(self, state: KeyValueState, shift: Tensor) -> KeyValueState:
        """The same state referring to another shift, of the shape of its own; only rounding tells them apart."""
        factor = state.shift - shift
        factor = factor.exp2() if self.feature_map.exponential else factor.exp()
        by_feature = factor.transpose(1, 2) if self.feature_map.exponential else factor
        # Exponential maps have no total: nothing is ever added to their kernel.
        total = state.total.clone() if self.feature_map.exponential else state.total * factor
        return KeyValueState(state.product * by_feature, total, shift.clone())

    @torch.no_grad()
    def merged(self, first: KeyValueState, second: KeyValueState) -> KeyValueState:
        """The state of the keys of both. Associative and commutative but for rounding."""
        shift = torch.maximum(first.shift, second.shift)
        left, right = self.shifted(first, shift), self.shifted(second, shift)
        return KeyValueState(left.product + right.product, left.total + right.total, shift)

    @torch.no_grad()
    def absorb(
        self,
        state: KeyValueState,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> None:
        """Add the keys (B, H, S, D) and values (B, H, S, E) to the state.

        Args:
            key_mask: (B or 1, H or 1, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S); finite where the key is kept.
        """
        _check_rows(state, k)
        dtype = state.product.dtype
        with full_precision(k):
            k, v = k.to(dtype), v.to(dtype)
            bias = None if key_bias is None else key_bias.to(dtype).unsqueeze(-1)
            if key_mask is not None:
                dropped = ~key_mask.unsqueeze(-1)
                k, v = k.masked_fill(dropped, 0), v.masked_fill(dropped, 0)
                bias = k.new_zeros(1, 1, 1) if bias is None else bias
                bias = bias.expand(*k.shape[:3], 1).masked_fill(dropped, -torch.inf)
            for start in range(0, k.shape[2], PROMPT_CHUNK):
                here = slice(start, start + PROMPT_CHUNK)
                self._absorb(state, k[:, :, here], v[:, :, here], None if bias is None else bias[:, :, here])

    def _absorb(self, state: KeyValueState, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        """Keys, values and log-weights (B or 1, H or 1, S, 1), -inf for padding."""
        scores, rows = self._scores(k), state.shift.shape[0]  # (B, H, S, R)
        values = torch.cat([v, v.new_ones(()).expand(*v.shape[:3], 1)], dim=-1).flatten(0, 1)  # (n, S, E + 1)
        if self.feature_map.exponential:
            if self.kernel.simplex:
                scores = scores - (scores * math.log(2)).logsumexp(-1, keepdim=True) * LOG2_E
            if bias is not None:
                scores = scores + bias * LOG2_E
            scores = scores.flatten(0, 1)
            largest = scores if scores.shape[1] == 1 else scores.amax(1, keepdim=True)
            raised = torch.maximum(state.shift, largest)
            state.product.mul_((state.shift - raised).exp2_().transpose(1, 2))
            phi = (scores - raised).exp2_()
        else:
            phi, raised = self._features(scores).flatten(0, 1), state.shift
            # Without log-weights the shift is 0 from the first key on. To look costs less than to multiply by 1, but
            # for a GPU, which would have to be waited for.
            if bias is not None or k.device.type != "cpu" or bool(state.shift.count_nonzero()):
                bias = k.new_zeros(1, 1, 1, 1) if bias is None else bias
                by_key = bias.expand(*k.shape[:3], 1).flatten(0, 1)  # (n, S, 1)
                raised = torch.maximum(state.shift, by_key.amax(1, keepdim=True))
                factor = (state.shift - raised).exp_()
                state.product.mul_(factor)
                state.total.mul_(factor)
                values = values * (by_key - raised).exp_()
            if self.smoothing is not None:
                state.total += values if values.shape[1] == 1 else values.sum(1, keepdim=True)
        state.shift = raised
        angle = self._angle(k)
        if angle is not None:
            values = torch.cat([values * angle.cos(), values * angle.sin()], dim=-1)
        if phi.shape[1] == 1:
            state.product.addcmul_(phi.view(rows, -1, 1), values)
        else:
            state.product.baddbmm_(phi.transpose(1, 2), values)

    @torch.no_grad()
    def step(self, state: KeyValueState, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None) -> Tensor:
        """Absorb one token (B, H, 1, .) and read from it, (B, H, 1, E): `absorb` and `read` in fewer calls.

        Args:
            key_bias: The log-weight of the key, (B or 1, H or 1, 1), finite.
        """
        exponential = self.feature_map.exponential and not self.kernel.simplex
        if not exponential or k.dtype != state.product.dtype or v.dtype != state.product.dtype or q.dtype != k.dtype:
            self.absorb(state, k, v, key_bias=key_bias)
            return self.read(state, q)
        _check_rows(state, k)
        with full_precision(k):
            rows, num_values = state.total.shape[0], v.shape[3]
            scores = self._scores(torch.cat([q, k], dim=2)).view(rows, 2, -1)
            query, key = scores[:, :1], scores[:, 1:]
            if key_bias is not None:
                key = key + (key_bias * LOG2_E).expand(*k.shape[:3]).reshape(rows, 1, 1)
            raised = torch.maximum(state.shift, key)
            state.product.mul_(state.shift.sub_(raised).exp2_().transpose(1, 2))
            phi = key.sub_(raised).exp2_().transpose(1, 2)
            state.product[..., :num_values].addcmul_(phi, v.reshape(rows, 1, num_values))
            state.product[..., num_values:].add_(phi)
            state.shift = raised
            query += raised if self.frequency_bias is None else raised + self._bias_of_rows(k.shape[0])
            weights = query.sub_(query.amax(-1, keepdim=True)).exp2_()
            product = torch.bmm(weights, state.product)
            # The key that was just absorbed is there: the denominator is above 0.
            return (product[..., :-1] / product[..., -1:]).view(*v.shape)

    def _bias_of_rows(self, batch: int) -> Tensor:
        """The frequencies' log-weights, (n, 1, R) or (1, 1, R)."""
        assert self.frequency_bias is not None
        return self.frequency_bias if self.frequency_bias.shape[0] == 1 else self.frequency_bias.repeat(batch, 1, 1)

    @torch.no_grad()
    def read(self, state: KeyValueState, q: Tensor) -> Tensor:
        """Results (B, H, L, E) of the queries (B, H, L, D), each against all keys absorbed so far."""
        _check_rows(state, q)
        with full_precision(q):
            queries = q.to(state.product.dtype)
            parts = [self._read(state, queries[:, :, i : i + PROMPT_CHUNK]) for i in range(0, q.shape[2], PROMPT_CHUNK)]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) if parts else state.total[:, :0, :-1]
        return out.view(*q.shape[:2], *out.shape[1:]).to(q.dtype)

    def _read(self, state: KeyValueState, q: Tensor) -> Tensor:
        """(n, L, E) of queries (B, H, L, D)."""
        scores = self._scores(q)
        if self.feature_map.exponential:
            if self.frequency_bias is not None:
                scores = scores + self.frequency_bias
            scores = scores.flatten(0, 1) + state.shift
            phi = scores.sub_(scores.amax(-1, keepdim=True)).exp2_()
        else:
            weighted = self._features(scores)
            phi = (weighted if self.frequency_bias is None else weighted.mul_(self.frequency_bias)).flatten(0, 1)
        product = torch.bmm(phi, state.product)
        angle = self._angle(q)
        if angle is not None:
            even, odd = product.chunk(2, dim=-1)
            product = torch.addcmul(even * angle.cos(), odd, angle.sin())
        if self.smoothing is not None:
            smoothing = self.smoothing if self.smoothing.shape[0] == 1 else self.smoothing.repeat(q.shape[0], 1, 1)
            product = torch.addcmul(product, state.total, smoothing)
            weight = state.total[..., -1:].masked_fill(state.total[..., -1:] == 0, 1)
            missing = (FLOOR * smoothing - product[..., -1:] / weight).clamp_(min=0)
            product = product.addcmul_(missing, state.total)
        denominator = product[..., -1:]
        return product[..., :-1] / denominator.masked_fill(denominator == 0, 1)

    def _scores(self, x: Tensor) -> Tensor:
        """(B, H, S, R) of x (B, H, S, D)."""
        return x.clone() if self.omega is None else _by_head(x, self.omega)

    def _features(self, scores: Tensor) -> Tensor:
        """(B, H, S, F) of scores (B, H, S, R), which are overwritten."""
        out = scores.new_empty(*scores.shape[:3], self.feature_map.parts * scores.shape[3])
        return self.feature_map.features(scores, out, dim=-1)

    def _angle(self, x: Tensor) -> Tensor | None:
        """x.offset, (n, S, 1), where frequencies come in pairs."""
        return None if self.pair_offset is None else _by_head(x, self.pair_offset).flatten(0, 1)


def _by_head(x: Tensor, matrix: Tensor) -> Tensor:
    """x (B, H, S, D) times one matrix (D, .) a head, (H or 1, D, .), without a copy of it for every sequence."""
    batch, heads, length, _ = x.shape
    if matrix.shape[0] == 1:
        return x @ matrix[0]
    if batch == 1:
        return torch.bmm(x[0], matrix).unsqueeze(0)
    by_head = torch.bmm(x.transpose(0, 1).reshape(heads, batch * length, -1), matrix)
    return by_head.view(heads, batch, length, -1).transpose(0, 1).contiguous()


def _check_rows(state: KeyValueState, tokens: Tensor) -> None:
    """Raises ArgumentError if the tokens (B, H, ., D) are not for the rows of the state."""
    batch, heads = tokens.shape[:2]
    if state.total.shape[0] != batch * heads:
        raise ArgumentError(f"the state is for {state.total.shape[0] // heads} sequences, got a batch of {batch}")
