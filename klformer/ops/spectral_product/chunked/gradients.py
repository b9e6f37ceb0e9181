"""How gradients of chunks become gradients of the operands."""

from collections.abc import Collection

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.tiling import Tile, multiply_into
from klformer.ops.spectral_product.operands import SpectralOperands


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
    """Takes the gradients of a tile's chunks: writes those of sequences, adds up those of parameters.

    Sums that nobody needs are None.
    """

    def __init__(self, tile: Tile, gradients: Gradients) -> None:
        self.tile = tile
        self._all = gradients.by_name

        def zeros(name: str, like: Tensor | None) -> Tensor | None:
            return torch.zeros_like(like) if name in self._all and like is not None else None

        self.omega = zeros("omega", tile.omega)  # (n, R, D)
        self.pair_offset = zeros("pair_offset", tile.pair_offset)  # (n, 1, D)
        self.frequency_bias = zeros("frequency_bias", tile.frequency_bias)  # (n, 1, R)
        self.smoothing = zeros("smoothing", tile.smoothing)  # (n, 1, 1), of R times the smoothing
        self.key_bias: Tensor | None = None  # (n, S, 1)
        if "key_bias" in self._all:
            self.key_bias = tile.new_zeros(tile.operands.k.shape[2], 1)

    def store(self, name: str, start: int, stop: int, left: Tensor, right: Tensor) -> None:
        """Write the gradient of a chunk of a sequence, the matrix product left right, (n, chunk, .)."""
        multiply_into(self._all[name].flatten(0, 1)[self.tile.rows, start:stop], left, right)

    def write(self, name: str, start: int, stop: int, gradient: Tensor) -> None:
        """Write the gradient (n, chunk, .) of a chunk of a sequence."""
        self._all[name].flatten(0, 1)[self.tile.rows, start:stop] = gradient

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
            scale = tile.operands.num_projections
            tile.add_to_parameter(self._all["smoothing"], self.smoothing.flatten() * scale)
        if self.key_bias is not None:
            tile.add_to_keys(self._all["key_bias"], self.key_bias.squeeze(-1))
