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
from klformer.ops.envelopes import gaussian_envelope
from klformer.ops.feature_maps import FeatureMap
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.chunked.positive import LOG2_E
from klformer.ops.spectral_product.key_values import NO_KEY, KeyValueState
from klformer.ops.spectral_product.operands import FLOOR, SpectralKernel, paired_frequencies

#: Tokens of a prompt that are worked on at a time.
PROMPT_CHUNK = 256
#: How far a score may be above its shift before the state is made to refer to a larger one: a power of two that is far
#: from the largest number, so that this is rare.
MAX_RISE = 30.0


@dataclass(frozen=True)
class PreparedKernel:
    """A kernel in the form that a step needs. Pairs of frequencies are written out."""

    kernel: SpectralKernel
    num_heads: int
    head_dim: int
    one: Tensor  # (1, 1, 1, 1), with the device and the precision of states
    omega: Tensor | None  # (H or 1, D, R); for scores to base 2 where the map is exponential
    frequency_bias: Tensor | None  # (H or 1, 1, R); to base 2 for exponential maps, else the weights (H or 1, 1, F)
    smoothing: Tensor | None  # (H or 1, 1, 1), times R

    @staticmethod
    @torch.no_grad()
    def of(kernel: SpectralKernel, *, num_heads: int, head_dim: int, like: Tensor) -> "PreparedKernel":
        """For states on the device of `like` and at least in its precision."""
        one = like.new_ones(1, 1, 1, 1, dtype=torch.promote_types(like.dtype, torch.float32))
        fmap, omega, bias, smoothing = kernel.feature_map, kernel.omega, kernel.frequency_bias, kernel.smoothing
        if omega is not None:
            omega = omega.to(one.dtype)
            if kernel.pair_offset is not None:
                omega = paired_frequencies(omega, kernel.pair_offset.to(one.dtype))
                bias = None if bias is None else torch.cat([bias, bias], dim=-1)
            omega = (omega * (LOG2_E if fmap.exponential else 1.0)).transpose(1, 2).contiguous()
            if smoothing is not None:
                smoothing = (smoothing.to(one.dtype) * omega.shape[2])[:, None, None]
        if bias is not None:
            bias = bias.to(one.dtype)
            bias = (bias * LOG2_E if fmap.exponential else bias.exp().repeat(1, fmap.parts)).unsqueeze(1)
        return PreparedKernel(kernel, num_heads, head_dim, one, omega, bias, smoothing)

    @property
    def feature_map(self) -> FeatureMap:
        return self.kernel.feature_map

    def initial_state(self, batch_size: int, value_dim: int) -> KeyValueState:
        """The state before the first key."""
        rows, num_scores = batch_size * self.num_heads, self.head_dim if self.omega is None else self.omega.shape[2]
        zeros = self.one.new_zeros
        return KeyValueState(
            product=zeros(rows, value_dim + 1, self.feature_map.parts * num_scores),
            total=zeros(rows, 1, value_dim + 1),
            shift=zeros(rows, 1, num_scores if self.feature_map.exponential else 1).fill_(NO_KEY),
        )

    @torch.no_grad()
    def shifted(self, state: KeyValueState, shift: Tensor) -> KeyValueState:
        """The same state referring to another shift, of the shape of its own; only rounding tells them apart."""
        factor = state.shift - shift
        factor = factor.exp2() if self.feature_map.exponential else factor.exp()
        # Exponential maps have no total: nothing is ever added to their kernel.
        total = state.total.clone() if self.feature_map.exponential else state.total * factor
        return KeyValueState(state.product * factor, total, shift.clone())

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
        scores = self._scores(k)  # (B, H, S, R)
        values = torch.cat([v, self.one.expand(*v.shape[:3], 1)], dim=-1).flatten(0, 1)  # (n, S, E + 1)
        if self.feature_map.exponential:
            if self.kernel.simplex:
                scores = scores - (scores * math.log(2)).logsumexp(-1, keepdim=True) * LOG2_E
            if bias is not None:
                scores = scores + bias * LOG2_E
            scores = scores.flatten(0, 1)
            raised = torch.maximum(state.shift, scores.amax(1, keepdim=True))
            state.product.mul_((state.shift - raised).exp2_())
            phi = (scores - raised).exp2_()
        else:
            phi, raised = self._features(scores).flatten(0, 1), state.shift
            # Without log-weights the shift is 0 from the first key on. To look costs less than to multiply by 1, but
            # for a GPU, which would have to be waited for.
            if bias is not None or k.device.type != "cpu" or bool(state.shift.any()):
                bias = k.new_zeros(1, 1, 1, 1) if bias is None else bias
                by_key = bias.expand(*k.shape[:3], 1).flatten(0, 1)  # (n, S, 1)
                raised = torch.maximum(state.shift, by_key.amax(1, keepdim=True))
                factor = (state.shift - raised).exp_()
                state.product.mul_(factor)
                state.total.mul_(factor)
                values = values * (by_key - raised).exp_()
            if self.smoothing is not None:
                state.total += values.sum(1, keepdim=True)
        state.shift = raised
        state.product.baddbmm_(values.transpose(1, 2), phi)

    @torch.no_grad()
    def step(
        self,
        state: KeyValueState,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None = None,
        *,
        norm_coefficient: float = 0.0,
    ) -> Tensor:
        """Absorb one token (B, H, 1, .) and read from it, (B, H, 1, E): `absorb` and `read` in fewer calls.

        Args:
            key_bias: The log-weight of the key, (B or 1, H or 1, 1), finite.
            norm_coefficient: c of the envelope exp(-c |k|^2) in place of a log-weight, for exponential maps.
        """
        if not self._steps_at_once(state, q, k, v, key_bias):
            bias = gaussian_envelope(k, norm_coefficient) if norm_coefficient else key_bias
            self.absorb(state, k, v, key_bias=bias)
            return self.read(state, q)
        _check_rows(state, k)
        with full_precision(k):
            scores = self._scores(torch.cat([q, k], dim=2)).view(state.shift.shape[0], 2, -1)
            values = torch.cat([v, self.one.expand(*v.shape[:3], 1)], dim=-1)  # (B, H, 1, E + 1)
            if norm_coefficient:
                key = k.reshape(-1, 1, k.shape[3])
                scores[:, 1:].sub_(torch.bmm(key, key.transpose(1, 2)), alpha=norm_coefficient * LOG2_E)
            features = self._exponential_pair if self.feature_map.exponential else self._feature_pair
            of_query, of_key = features(state, scores, key_bias, k.shape[0])  # (n, 1, F) each
            state.product.addcmul_(of_key, values.view(-1, values.shape[3], 1))
            product = torch.bmm(state.product, of_query.transpose(1, 2))  # (n, E + 1, 1)
            if self.smoothing is not None:
                state.total += values.view(state.total.shape)
                by_head = product.view(*v.shape[:2], 1, -1)
                total = state.total.view(by_head.shape)
                by_head.addcmul_(total, self._smoothing_of(by_head[..., -1:] / total[..., -1:], self.smoothing))
            # The key that was just absorbed is there: the denominator is not that of no key.
            return (product[:, :-1] / product[:, -1:]).view(v.shape)

    def _steps_at_once(self, state: KeyValueState, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None) -> bool:
        """Whether `step` has a way of its own: on a CPU, which can be asked what a state holds."""
        same = q.dtype == k.dtype == v.dtype == state.product.dtype and k.device.type == "cpu"
        if self.feature_map.exponential:
            return same
        return same and key_bias is None and not bool(state.shift.any())

    def _exponential_pair(
        self, state: KeyValueState, scores: Tensor, key_bias: Tensor | None, batch: int
    ) -> tuple[Tensor, Tensor]:
        """Features of a query and a key, of scores (n, 2, R); the state refers to a larger shift if it has to."""
        query, key = scores[:, :1], scores[:, 1:]
        if self.kernel.simplex:
            key = (key * math.log(2)).log_softmax(-1).mul_(LOG2_E)
        if key_bias is not None:
            key = key + (key_bias * LOG2_E).expand(batch, self.num_heads, 1).reshape(-1, 1, 1)
        rise = key - state.shift
        if float(rise.amax()) > MAX_RISE:
            raised = torch.maximum(state.shift, key)
            state.product.mul_(state.shift.sub_(raised).exp2_())
            state.shift, rise = raised, key - raised
        query = query + state.shift
        if self.frequency_bias is not None:
            query.view(batch, -1, 1, query.shape[2]).add_(self.frequency_bias)
        return query.sub_(query.amax(-1, keepdim=True)).exp2_(), rise.exp2_()

    def _feature_pair(
        self, state: KeyValueState, scores: Tensor, key_bias: Tensor | None, batch: int
    ) -> tuple[Tensor, Tensor]:
        """Features of a query and a key, of scores (n, 2, R)."""
        pair = self._features(scores)
        query, key = pair[:, :1], pair[:, 1:]
        if self.frequency_bias is not None:
            query = (query.view(batch, -1, 1, query.shape[2]) * self.frequency_bias).flatten(0, 1)
        return query, key

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
        product = torch.bmm(phi, state.product.transpose(1, 2))
        if self.smoothing is not None:
            smoothing = self.smoothing if self.smoothing.shape[0] == 1 else self.smoothing.repeat(q.shape[0], 1, 1)
            weight = state.total[..., -1:].masked_fill(state.total[..., -1:] == 0, 1)
            product.addcmul_(state.total, self._smoothing_of(product[..., -1:] / weight, smoothing))
        denominator = product[..., -1:]
        return product[..., :-1] / denominator.masked_fill(denominator == 0, 1)

    @staticmethod
    def _smoothing_of(mean: Tensor, smoothing: Tensor) -> Tensor:
        """What a query's kernel gets added, of the mean that it has without: the smoothing, or as much more as leaves
        no mean below half of it (`operands.py`)."""
        return torch.maximum(smoothing, FLOOR * smoothing - mean)

    def _scores(self, x: Tensor) -> Tensor:
        """(B, H, S, R) of x (B, H, S, D)."""
        return x.clone() if self.omega is None else _by_head(x, self.omega)

    def _features(self, scores: Tensor) -> Tensor:
        """(..., F) of scores (..., R), which are overwritten."""
        out = scores.new_empty(*scores.shape[:-1], self.feature_map.parts * scores.shape[-1])
        return self.feature_map.features(scores, out, dim=-1)


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
