"""How gradients of chunks become gradients of the tensors of a call."""

from collections.abc import Collection

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.tiles import Tile
from klformer.ops.spectral_product.operands import Call, Sums

#: Written chunk by chunk, whoever needs them; all others are added up where they are needed.
WRITTEN = ("q", "k", "v", *Sums._fields)


class Gradients:
    """Gradients of a call: those of sequences and sums uninitialised, those of parameters zero."""

    def __init__(self, call: Call, needed: Collection[str]) -> None:
        self.by_name = {
            name: torch.empty_like(x) if name in WRITTEN else torch.zeros(x.shape, dtype=call.dtype, device=x.device)
            for name, x in call.tensors().items()
            if x is not None and name != "key_mask" and (name in WRITTEN or name in needed)
        }


class TileGradients:
    """Takes the gradients of a tile's chunks: writes those of sequences, adds up those of parameters.

    Sums that nobody needs are None.
    """

    def __init__(self, tile: Tile, gradients: Gradients) -> None:
        self.tile = tile
        self._all = gradients.by_name

        def zeros(name: str, like: Tensor | None) -> Tensor | None:
            return torch.zeros_like(like) if name in self._all and like is not None else None

        self.omega = zeros("omega", tile.omega)  # (heads or 1, R, D)
        self.pair_offset = zeros("pair_offset", tile.pair_offset)  # (n, 1, D)
        self.frequency_bias = zeros("frequency_bias", tile.frequency_bias)  # (n, 1, R)
        self.smoothing = zeros("smoothing", tile.smoothing)  # (n, 1, 1), of R times the smoothing
        self.key_bias = self._all.get("key_bias")

    def write(self, name: str, start: int, stop: int, gradient: Tensor) -> None:
        """Write the gradient (n, chunk, .) of a chunk of a sequence."""
        self.tile.write(self._all[name][:, :, start:stop], gradient)

    def store(self, name: str, start: int, stop: int, left: Tensor, right: Tensor) -> None:
        """Write the gradient of a chunk of a sequence, the matrix product left right, (n, chunk, .)."""
        self.tile.multiply_into(self._all[name][:, :, start:stop], left, right)

    def store_inputs(
        self,
        name: str,
        start: int,
        stop: int,
        x: Tensor,
        d_scores: Tensor,
        *,
        d_angle: Tensor | None = None,
        more: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write the gradient of queries or keys, and add to those of what they were projected on.

        Args:
            name: "q" or "k".
            start: First token.
            stop: Token after the last.
            x: Those tokens, (n, chunk, D).
            d_scores: Gradient of their scores, (n, chunk, R).
            d_angle: That of their products with the pair offset, (n, 1, chunk).
            more: Two factors of what their gradient has besides, broadcastable to (n, chunk, D).
        """
        tile = self.tile
        if tile.omega is None:
            self.write(name, start, stop, d_scores)
            return
        if self.omega is not None:
            tile.add_gradient_of_frequencies(self.omega, d_scores, x)
        if d_angle is not None and tile.pair_offset is not None:
            more = d_angle.transpose(1, 2), tile.pair_offset
            if self.pair_offset is not None:
                self.pair_offset.baddbmm_(d_angle, x)
        tile.back_project(d_scores, tile.omega, self._all[name][:, :, start:stop], more)

    def room(self, name: str) -> Tensor:
        """Return room for the gradient of sums of that name, (n, ...), uninitialised."""
        return self.tile.room(self._all[name])

    def write_sums(self, values: Tensor, weights: Tensor, log_scale: Tensor) -> None:
        """Write the gradients of sums: (n, F, E), (n, F) and (n, F or 1)."""
        for name, gradient in zip(Sums._fields, (values, weights, log_scale), strict=True):
            self.tile.write(self._all[name], gradient)

    def finish(self) -> None:
        """Add what was added up to the gradients of the parameters."""
        tile = self.tile
        if self.omega is not None:
            tile.add_to_parameter(self._all["omega"], self.omega)
        if self.pair_offset is not None:
            tile.add_to_parameter(self._all["pair_offset"], self.pair_offset.squeeze(1))
        if self.frequency_bias is not None:
            tile.add_to_parameter(self._all["frequency_bias"], self.frequency_bias.squeeze(1))
        if self.smoothing is not None:
            scale = tile.call.num_projections
            tile.add_to_parameter(self._all["smoothing"], self.smoothing.flatten() * scale)
