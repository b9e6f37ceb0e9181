"""Sums as chunks work with them: values and weights as rows of one matrix, features as its columns.

    state = [sum_j w_j phi(k_j) v_j, sum_j w_j phi(k_j)]        (W, F), W = E + 1; twice that with a pair offset

The row of weights beside those of values is a row more of a matrix product, which costs what it should; a column more
would cost up to 60%. The constant feature of the smoothing is a column of its own, `total`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.tiles import Tile
from klformer.ops.spectral_product.operands import NO_KEY, Sums


@dataclass
class Carried:
    """The sums of a tile's rows, or their gradients."""

    state: Tensor  # (n, W, F)
    total: Tensor  # (n, E + 1, 1); zeros without smoothing
    shift: Tensor  # (n, 1, R) to base 2 for exponential maps, (n, 1, 1) for others; a constant

    @staticmethod
    def room(tile: Tile) -> "Carried":
        """Return sums whose state is uninitialised; the rest is that of no key."""
        call, pairs = tile.call, 1 if tile.pair_offset is None else 2
        shape = (tile.num_rows, pairs * (call.value_dim + 1), call.num_features)
        state = torch.empty(shape, dtype=tile.dtype, device=call.device)
        shift = state.new_full((tile.num_rows, 1, call.num_scales), NO_KEY)
        return Carried(state, no_total(tile), shift)

    @staticmethod
    def empty(tile: Tile) -> "Carried":
        """Return the sums of no key."""
        found = Carried.room(tile)
        found.state.zero_()
        return found

    @staticmethod
    def of(tile: Tile, values: Tensor | None, weights: Tensor | None) -> "Carried":
        """Return a tile's rows of values (B, H, F, E) and weights (B, H, F), or of their gradients; None for zero."""
        found = Carried.room(tile) if values is not None and weights is not None else Carried.empty(tile)
        of_values, of_weights = (None if x is None else tile.rows(x) for x in (values, weights))
        for features, rows in found._by_feature(tile):
            if of_values is not None:
                rows[:, :-1] = of_values[:, features].mT
            if of_weights is not None:
                rows[:, -1] = of_weights[:, features]
        return found

    def write(self, tile: Tile, values: Tensor, weights: Tensor) -> None:
        """Write what `of` reads."""
        for features, rows in self._by_feature(tile):
            tile.write(values[:, :, features], rows[:, :-1].mT)
            tile.write(weights[:, :, features], rows[:, -1])

    def _by_feature(self, tile: Tile) -> Iterator[tuple[slice, Tensor]]:
        """Yield features as `Sums` counts them, with their rows (n, E + 1, features) here."""
        size = self.state.shape[2]
        for number, rows in enumerate(torch.split(self.state, tile.call.value_dim + 1, dim=1)):
            yield slice(number * size, (number + 1) * size), rows
        if tile.smoothing is not None:
            yield slice(-1, None), self.total


def no_total(tile: Tile) -> Tensor:
    """Return the total of no key, (n, E + 1, 1); without smoothing one for all rows, that nobody changes."""
    if tile.smoothing is not None:
        return tile.new_zeros(tile.call.value_dim + 1, 1)
    return torch.zeros((), dtype=tile.dtype, device=tile.call.device).expand(tile.num_rows, tile.call.value_dim + 1, 1)


def sums_before(tile: Tile, unit: float) -> Carried:
    """Return the sums that a call goes on from, or those of no key; log-scales times `unit`."""
    if tile.call.sums is None:
        return Carried.empty(tile)
    found = Carried.of(tile, tile.call.sums.values, tile.call.sums.weights)
    found.shift = tile.rows(tile.call.sums.log_scale).unsqueeze(1) * unit
    return found


def write_sums(tile: Tile, carried: Carried, sums: Sums, unit: float) -> None:
    """Write sums, the log-scales over `unit`."""
    carried.write(tile, sums.values, sums.weights)
    tile.write(sums.log_scale, carried.shift.squeeze(1).div(unit).clamp(min=NO_KEY))
