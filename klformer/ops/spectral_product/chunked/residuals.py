"""What forward leaves for backward, and how gradients of chunks become gradients of the operands."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.chunk import Attended, KeyChunk, reciprocal
from klformer.ops.spectral_product.chunked.tiling import Tile
from klformer.ops.spectral_product.operands import SpectralOperands
from klformer.ops.spectral_product.state import KeyValueState


@dataclass
class Residuals:
    """The result, and what backward needs besides the operands. Rows are (batch, head) pairs, B * H of them."""

    out: Tensor  # (B, H, L, E)
    denominator: Tensor  # (B * H, L, 1), of the shifted features
    product: Tensor  # (parts, B * H, states, R, W): the state at the end; causal: one for each checkpoint
    total: Tensor  # (B * H, states, E + 1); no states where there is no smoothing
    key_shift: Tensor  # (B * H, states, R, 1 or 0), the shifts of the states
    query_shift: Tensor  # (B * H, L, 1) largest score of each query; L = 0 where the map needs none
    slope: Tensor  # (B, H, L, E) derivative of `out` by the query's angle; E = 0 without a pair offset
    starts: Tensor  # (B * H, L) bool: where a causal segment starts; L = 0 where segments are the chunks

    @staticmethod
    def empty(operands: SpectralOperands, *, num_states: int, segmented: bool) -> "Residuals":
        """Uninitialised residuals of the right shapes; `num_states` states a row."""
        batch, heads, length, _ = operands.q.shape
        rows, num_values = batch * heads, operands.v.shape[-1]
        kernel, fmap = operands.kernel, operands.feature_map

        def empty(*shape: int, dtype: torch.dtype = operands.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=operands.q.device)

        return Residuals(
            out=empty(batch, heads, length, num_values, dtype=operands.v.dtype),
            denominator=empty(rows, length, 1),
            product=empty(fmap.parts, rows, num_states, operands.num_projections, operands.value_columns),
            total=empty(rows, 0 if kernel.smoothing is None else num_states, num_values + 1),
            key_shift=empty(rows, num_states, operands.num_shifts),
            query_shift=empty(rows, length if fmap.exponential else 0, 1),
            slope=empty(batch, heads, length, 0 if kernel.pair_offset is None else num_values),
            starts=empty(rows, length if segmented else 0, dtype=torch.bool),
        )

    def as_list(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    @staticmethod
    def from_list(tensors: Sequence[Tensor]) -> "Residuals":
        return Residuals(*tensors)

    def save_state(self, tile: Tile, state: KeyValueState, index: int = 0) -> None:
        """Keep the state of a tile at a checkpoint."""
        parts = tile.feature_map.parts
        self.product[:, tile.rows, index] = state.product.view(parts, tile.num_rows, *state.product.shape[1:])
        self.key_shift[tile.rows, index : index + 1] = state.shift
        if tile.smoothing is not None:
            self.total[tile.rows, index : index + 1] = state.total

    def load_state(self, tile: Tile, index: int = 0) -> KeyValueState:
        """The state of a tile at a checkpoint, as a copy; without smoothing its total is empty."""
        return KeyValueState(
            product=self.product[:, tile.rows, index].flatten(0, 1).clone(),
            total=self.total[tile.rows, index : index + 1].clone(),
            shift=self.key_shift[tile.rows, index : index + 1].clone(),
        )

    def store(self, attended: Attended, tile: Tile, start: int, stop: int) -> None:
        """Write the results of a chunk of queries."""
        self.out.flatten(0, 1)[tile.rows, start:stop] = attended.out
        self.denominator[tile.rows, start:stop] = attended.denominator
        if attended.slope is not None:
            self.slope.flatten(0, 1)[tile.rows, start:stop] = attended.slope
        if attended.query_shift is not None:
            self.query_shift[tile.rows, start:stop] = attended.query_shift

    def product_gradient(self, tile: Tile, d_out: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Gradients of [numerator, denominator] (n, chunk, E + 1) and of the queries' angles (n, chunk, 1)."""
        d_quotient = tile.chunk(d_out, start, stop)
        inverse = reciprocal(self.denominator[tile.rows, start:stop])
        d_product = d_quotient.new_empty(*d_quotient.shape[:-1], d_quotient.shape[-1] + 1)
        torch.mul(d_quotient, inverse, out=d_product[..., :-1])
        weighted = (d_quotient * tile.chunk(self.out, start, stop)).sum(-1, keepdim=True)
        torch.mul(weighted, -inverse, out=d_product[..., -1:])
        if tile.pair_offset is None:
            return d_product, None
        return d_product, (d_quotient * tile.chunk(self.slope, start, stop)).sum(-1, keepdim=True)


class Gradients:
    """Gradients of the operands that are needed: those of sequences uninitialised, those of parameters zero.

    The gradient of a log-weight that broadcasts is added up over what it broadcasts over, as for any parameter.
    """

    SEQUENCES = ("q", "k", "v")

    def __init__(self, operands: SpectralOperands, needed: Collection[str]) -> None:
        tensors = operands.tensors()
        wanted = {name: tensors[name] for name in tensors if name in needed or name in self.SEQUENCES}
        self.by_name = {
            name: torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if name in self.SEQUENCES
            else torch.zeros(x.shape, dtype=operands.dtype, device=x.device)
            for name, x in wanted.items()
        }


class TileGradients:
    """Writes the gradients of a tile's queries, keys and values, and adds up those of the parameters on the way."""

    def __init__(self, tile: Tile, gradients: Gradients) -> None:
        self.tile = tile
        self._all = gradients.by_name

        def zeros(name: str, like: Tensor | None) -> Tensor | None:
            return torch.zeros_like(like) if name in self._all and like is not None else None

        self._omega = zeros("omega", tile.omega)  # (n, R, D)
        self._pair_offset = zeros("pair_offset", tile.pair_offset)  # (n, 1, D)
        self._frequency_bias = zeros("frequency_bias", tile.frequency_bias)  # (n, 1, R)
        self._smoothing = zeros("smoothing", tile.smoothing)  # (n, 1, 1)
        self._key_bias: Tensor | None = None  # (n, S)
        if "key_bias" in self._all:
            k = tile.operands.k
            self._key_bias = k.new_zeros(tile.num_rows, k.shape[2], dtype=tile.operands.dtype)

    def store_queries(
        self, queries: Tensor, phi: Tensor, d_phi: Tensor, d_angle: Tensor | None, start: int, stop: int
    ) -> None:
        """Write the gradient of a chunk of queries, given that of their weighted features, which is overwritten."""
        fmap = self.tile.feature_map
        if self._frequency_bias is not None:
            self._frequency_bias += fmap.merge((phi * d_phi).sum(1, keepdim=True))
        self._store("q", queries, fmap.vjp(phi, d_phi), d_angle, start, stop)

    def store_keys(self, chunk: KeyChunk, d_phi: Tensor, d_values: Tensor, d_angle: Tensor | None, start: int) -> None:
        """Write the gradients of a chunk of keys and values, given those of features and of weighted values."""
        fmap, stop = self.tile.feature_map, start + chunk.keys.shape[1]
        d_scores = fmap.vjp(chunk.phi, d_phi)
        if self._key_bias is not None:
            by_key = d_scores if fmap.exponential else d_values * chunk.values
            self._key_bias[:, start:stop] = by_key.sum(-1)
        self._store("k", chunk.keys, d_scores, d_angle, start, stop)
        d_values = d_values[..., :-1] if chunk.weights is None else d_values[..., :-1] * chunk.weights
        dropped = self.tile.dropped(start, stop)
        if dropped is not None:
            d_values = d_values.masked_fill(dropped, 0)  # padding gets exactly 0
        self._all["v"].flatten(0, 1)[self.tile.rows, start:stop] = d_values

    def add_smoothing(self, d_product: Tensor, totals: Tensor) -> None:
        """Count what the smoothing added to products: (n, chunk or 1, E + 1) both."""
        if self._smoothing is not None:
            self._smoothing += (d_product * totals).sum((1, 2), keepdim=True)

    @property
    def needs_smoothing(self) -> bool:
        return self._smoothing is not None

    def _store(self, name: str, x: Tensor, d_scores: Tensor, d_angle: Tensor | None, start: int, stop: int) -> None:
        d_x = self.tile.feature_map.scores_vjp(d_scores, self.tile.omega)
        if self._omega is not None:
            self._omega.baddbmm_(d_scores.transpose(1, 2), x)
        if d_angle is not None and self.tile.pair_offset is not None:
            d_x = d_x.addcmul(d_angle, self.tile.pair_offset)
            if self._pair_offset is not None:
                self._pair_offset.baddbmm_(d_angle.transpose(1, 2), x)
        self._all[name].flatten(0, 1)[self.tile.rows, start:stop] = d_x

    def finish(self) -> None:
        """Add what was added up to the gradients of the parameters."""
        tile = self.tile
        if self._omega is not None:
            tile.add_to_parameter(self._all["omega"], self._omega)
        if self._pair_offset is not None:
            tile.add_to_parameter(self._all["pair_offset"], self._pair_offset.squeeze(1))
        if self._frequency_bias is not None:
            tile.add_to_parameter(self._all["frequency_bias"], self._frequency_bias.squeeze(1))
        if self._smoothing is not None:
            scale = tile.operands.num_projections
            tile.add_to_parameter(self._all["smoothing"], self._smoothing.flatten() * scale)
        if self._key_bias is not None:
            tile.add_to_keys(self._all["key_bias"], self._key_bias)
