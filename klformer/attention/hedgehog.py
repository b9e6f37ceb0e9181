"""Hedgehog's learned map (Zhang et al., 2024): softmax over the projections of a token and their negatives.

    phi(x) = softmax([W x, -W x]),      one W for queries, another for keys, a head its own

Softmax's normaliser of a query cancels in attention's quotient, that of a key is the simplex envelope: this is a kernel
of positive features whose frequencies come in pairs, with other frequencies for queries than for keys. Both fit into
one product if queries are (q, 0), keys (0, k) and frequencies (w_q, w_k).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from klformer.attention.base import AttentionSizes
from klformer.attention.registry import register_attention
from klformer.attention.spectral import NEAR_GAIN, SpectralAttention
from klformer.checks import check_choice, check_count
from klformer.errors import ArgumentError
from klformer.kernels.coupling import orthogonal_rows
from klformer.kernels.kernel import Role
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product import BACKENDS, SpectralKernel


class HedgehogAttention(SpectralAttention):
    """Attention with Hedgehog's map, linear in the length.

    Args:
        num_frequencies: Features R, an even number: R / 2 rows of W and their negatives. W starts as the identity,
            followed by orthogonal rows if R is more than 2 D. Hedgehog has R = 2 D.
        backend: Who computes its products: "auto", or a name as in `klformer.spectral_product`.
        window: Keys on each side of a query that it sees exactly besides.
        near_gain: Where the log-gain of these starts.
    """

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        num_frequencies: int = 128,
        backend: str = "auto",
        window: int = 0,
        near_gain: float = NEAR_GAIN,
    ) -> None:
        super().__init__(sizes, window=window, near_gain=near_gain)
        check_count("num_frequencies", num_frequencies, minimum=2)
        if num_frequencies % 2:
            raise ArgumentError(f"num_frequencies must be even, for pairs of features, got {num_frequencies}")
        if backend != "auto":
            BACKENDS[backend]
        self._backend = backend
        count, dim = num_frequencies // 2, sizes.head_dim
        more = orthogonal_rows(max(0, count - dim), dim, None)
        identity = torch.eye(dim)
        rows = torch.cat([identity, more.to(identity.device)])[:count]  # the device of the moment may be meta
        #: (H, R / 2, D).
        self.query_map = nn.Parameter(rows.repeat(sizes.num_heads, 1, 1))
        self.key_map = nn.Parameter(rows.repeat(sizes.num_heads, 1, 1))

    def features(self, x: Tensor, role: Role) -> Tensor:
        check_choice("role", role, ("query", "key"))
        self._check_heads("x", x)
        with full_precision(x) as dtype:
            rows = _pairs(self.query_map if role == "query" else self.key_map).to(dtype)
            return (x.to(dtype) @ rows.transpose(-1, -2)).softmax(-1)

    @property
    def backend(self) -> str:
        return self._backend

    def present(self) -> SpectralKernel:
        omega = torch.cat([_pairs(self.query_map), _pairs(self.key_map)], dim=-1)
        return SpectralKernel(FEATURE_MAPS["prf"], omega=omega, simplex=True)

    def as_query(self, q: Tensor) -> Tensor:
        return pad(q, (0, q.shape[-1]))

    def as_key(self, k: Tensor) -> Tensor:
        return pad(k, (k.shape[-1], 0))


def _pairs(rows: Tensor) -> Tensor:
    """(H, R / 2, D) -> (H, R, D): the rows and their negatives."""
    return torch.cat([rows, -rows], dim=1)


register_attention(
    "hedgehog", HedgehogAttention, "Hedgehog's learned map: softmax over projections and their negatives"
)
