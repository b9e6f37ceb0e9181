"""Hedgehog's learned map (Zhang et al., 2024): softmax over the projections of a token and their negatives.

    phi(x) = softmax([W x, -W x]),      one W for queries, another for keys, a head its own

Softmax's normaliser of a query cancels in attention's quotient, that of a key is the simplex envelope: this is a kernel
of positive features whose frequencies come in pairs, with other frequencies for queries than for keys. Both fit into
one product if queries are (q, 0), keys (0, k) and frequencies (w_q, w_k).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import register_attention
from klformer.checks import check_choice, check_count
from klformer.errors import ArgumentError
from klformer.kernels.coupling import orthogonal_rows
from klformer.kernels.kernel import Role
from klformer.ops.envelopes import simplex_envelope
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import SpectralKernel, SpectralOperands, attend, kept_keys
from klformer.ops.spectral_product.decoding import PreparedKernel
from klformer.ops.spectral_product.key_values import KeyValueState
from klformer.ops.spectral_product.parts import PartProduct


class HedgehogAttention(AttentionMechanism):
    """Attention with Hedgehog's map, linear in the length.

    Args:
        num_frequencies: Features R, an even number: R / 2 rows of W and their negatives. W starts as the identity,
            followed by orthogonal rows if R is more than 2 D. Hedgehog has R = 2 D.
    """

    supports_key_bias = True
    supports_parts = True

    def __init__(self, sizes: AttentionSizes, *, num_frequencies: int = 128) -> None:
        super().__init__(sizes)
        check_count("num_frequencies", num_frequencies, minimum=2)
        if num_frequencies % 2:
            raise ArgumentError(f"num_frequencies must be even, for pairs of features, got {num_frequencies}")
        count, dim = num_frequencies // 2, sizes.head_dim
        more = orthogonal_rows(max(0, count - dim), dim, None)
        identity = torch.eye(dim)
        rows = torch.cat([identity, more.to(identity.device)])[:count]  # the device of the moment may be meta
        #: (H, R / 2, D).
        self.query_map = nn.Parameter(rows.repeat(sizes.num_heads, 1, 1))
        self.key_map = nn.Parameter(rows.repeat(sizes.num_heads, 1, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        return self._attend(q, k, v, key_mask, None, causal)

    def attend_weighted(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, key_bias: Tensor, causal: bool
    ) -> Tensor:
        return self._attend(q, k, v, key_mask, key_bias, causal)

    def features(self, x: Tensor, role: Role) -> Tensor:
        check_choice("role", role, ("query", "key"))
        return (x @ _pairs(self.query_map if role == "query" else self.key_map).transpose(-1, -2)).softmax(-1)

    def initial_state(self, batch_size: int) -> KeyValueState:
        return self._prepare().initial_state(batch_size, self.value_dim)

    def absorb(
        self,
        state: KeyValueState,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> KeyValueState:
        mask = kept_keys(key_mask, key_bias)
        bias = self._log_weights(k, mask, key_bias)
        after = state.clone()
        self._prepare().absorb(after, _as_key(k), v, key_mask=mask, key_bias=bias)
        return after

    def read(self, state: KeyValueState, q: Tensor) -> Tensor:
        return self._prepare().read(state, _as_query(q))

    def merge(self, first: KeyValueState, second: KeyValueState) -> KeyValueState:
        return self._prepare().merged(first, second)

    def begin(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None, causal: bool
    ) -> PartProduct:
        self._check_operands(k, k, v, key_mask, causal)
        mask = kept_keys(key_mask, key_bias)
        bias = self._log_weights(k, mask, key_bias)
        return PartProduct(
            self._kernel(), _as_key(k), v, key_mask=mask, key_bias=bias, causal=causal, parts=self._known_parts()
        )

    def finish(self, begun: PartProduct, q: Tensor) -> Tensor:
        return begun.read(_as_query(q))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, key_bias: Tensor | None, causal: bool
    ) -> Tensor:
        if self.parts is not None:
            return self.finish(self.begin(k, v, key_mask=key_mask, key_bias=key_bias, causal=causal), q)
        mask = kept_keys(key_mask, key_bias)
        bias = self._log_weights(k, mask, key_bias)
        operands = SpectralOperands(
            self._kernel(), _as_query(q), _as_key(k), v, key_mask=mask, key_bias=bias, causal=causal
        )
        return attend(operands)

    def _prepare(self) -> PreparedKernel:
        """The kernel for decoding."""
        return PreparedKernel.of(
            self._kernel(), num_heads=self.num_heads, head_dim=2 * self.head_dim, like=self._anchor
        )

    def _kernel(self) -> SpectralKernel:
        omega = torch.cat([_pairs(self.query_map), _pairs(self.key_map)], dim=-1)
        return SpectralKernel(FEATURE_MAPS["prf"], omega=omega)

    def _log_weights(self, k: Tensor, key_mask: Tensor | None, key_bias: Tensor | None) -> Tensor:
        envelope = simplex_envelope(k, _pairs(self.key_map), key_mask)
        return envelope if key_bias is None else envelope + key_bias


def _pairs(rows: Tensor) -> Tensor:
    """(H, R / 2, D) -> (H, R, D): the rows and their negatives."""
    return torch.cat([rows, -rows], dim=1)


def _as_query(q: Tensor) -> Tensor:
    return pad(q, (0, q.shape[-1]))


def _as_key(k: Tensor) -> Tensor:
    return pad(k, (k.shape[-1], 0))


register_attention(
    "hedgehog", HedgehogAttention, "Hedgehog's learned map: softmax over projections and their negatives"
)
