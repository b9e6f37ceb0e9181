"""One chunk of one tile: what the bidirectional product, the causal one and decoding do with it, forwards.

Rows are (batch, head) pairs, n of them in a tile. Weights of frequencies go to the queries' features; log-weights of
keys go to the scores of exponential maps, and otherwise to the values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klformer.ops.spectral_product.chunked.modulation import demodulate, modulate
from klformer.ops.spectral_product.chunked.tiling import Tile
from klformer.ops.spectral_product.state import NO_KEY, KeyValueState


def empty_state(tile: Tile) -> KeyValueState:
    """The state before the first key."""
    operands = tile.operands

    def zeros(*shape: int) -> Tensor:
        return operands.k.new_zeros(shape, dtype=operands.dtype)

    product = zeros(operands.feature_map.parts * tile.num_rows, operands.num_projections, operands.value_columns)
    total = zeros(tile.num_rows, 1, operands.v.shape[-1] + 1)
    return KeyValueState(product, total, zeros(tile.num_rows, 1, operands.num_shifts).fill_(NO_KEY))


@dataclass
class KeyChunk:
    """Keys and values of a chunk, and what becomes of them under a state's shift."""

    keys: Tensor  # (n, chunk, D), 0 for padding
    phi: Tensor  # (parts n, chunk, R)
    values: Tensor  # [v, 1] times the keys' weights, (n, chunk, E + 1), 0 for padding
    weights: Tensor | None  # exp(key_bias - shift), (n, chunk, 1), of a map that is not exponential
    angle: Tensor | None  # (n, chunk, 1)

    def modulated(self) -> Tensor:
        """What is added up in a state, (n, chunk, W)."""
        return modulate(self.values, self.angle)


def key_scores(tile: Tile, keys: Tensor, start: int, stop: int) -> Tensor:
    """Scores of a chunk of keys; those of an exponential map with the log-weights of the keys."""
    scores = tile.feature_map.scores(keys, tile.omega)
    bias = tile.key_bias(start, stop)
    return scores.add_(bias) if tile.feature_map.exponential and bias is not None else scores


def largest_of_chunk(tile: Tile, scores: Tensor, start: int, stop: int) -> Tensor | None:
    """What the shift of a state must not be below after this chunk, (n, 1, R or 1); None where there is no shift."""
    if tile.feature_map.exponential:
        return scores.amax(1, keepdim=True)
    bias = tile.key_bias(start, stop)
    return None if bias is None else bias.amax(1, keepdim=True)


def key_chunk(tile: Tile, keys: Tensor, scores: Tensor, shift: Tensor, start: int, stop: int) -> KeyChunk:
    """The chunk referring to a shift. Overwrites the scores."""
    weights, values = None, tile.values(start, stop)
    if tile.feature_map.exponential:
        scores -= shift
    elif (bias := tile.key_bias(start, stop)) is not None:
        weights = (bias - shift).exp_()
        values *= weights
    return KeyChunk(keys, tile.feature_map.features(scores), values, weights, tile.angle(keys))


def absorb_chunk(state: KeyValueState, tile: Tile, start: int, stop: int) -> None:
    """Add the keys and values of a chunk to a state, in place."""
    keys = tile.keys(start, stop)
    scores = key_scores(tile, keys, start, stop)
    largest = largest_of_chunk(tile, scores, start, stop)
    if largest is not None:
        state.raise_shift(tile.feature_map, largest)
    chunk = key_chunk(tile, keys, scores, state.shift, start, stop)
    state.product.baddbmm_(chunk.phi.transpose(1, 2), tile.feature_map.repeat(chunk.modulated()))
    if tile.smoothing is not None:
        state.total += chunk.values.sum(1, keepdim=True)


def query_scores(tile: Tile, queries: Tensor, key_shift: Tensor) -> Tensor:
    """Scores of a chunk of queries; those of an exponential map with all that belongs to the features."""
    scores = tile.feature_map.scores(queries, tile.omega)
    if tile.feature_map.exponential:
        scores += key_shift if tile.frequency_bias is None else key_shift + tile.frequency_bias
    return scores


def query_features(tile: Tile, scores: Tensor) -> Tensor:
    """Features (parts n, chunk, R), times the frequencies' weights. Overwrites the scores."""
    phi = tile.feature_map.features(scores)
    if tile.frequency_bias is not None and not tile.feature_map.exponential:
        phi *= tile.feature_map.repeat(tile.frequency_bias.exp())
    return phi


@dataclass
class Attended:
    """Results of a chunk of queries."""

    out: Tensor  # (n, chunk, E)
    denominator: Tensor  # (n, chunk, 1)
    slope: Tensor | None  # (n, chunk, E), the derivative of `out` by the angle
    query_shift: Tensor | None  # (n, chunk, 1), the largest score of each query


def attend_chunk(state: KeyValueState, tile: Tile, queries: Tensor) -> Attended:
    """Results of a chunk of queries (n, chunk, D) against all that a state has absorbed."""
    scores = query_scores(tile, queries, state.shift)
    query_shift = subtract_largest(tile, scores)
    product = tile.feature_map.merge(torch.bmm(query_features(tile, scores), state.product))
    product, slope = demodulate(product, tile.angle(queries))
    if tile.smoothing is not None:
        product += state.total * tile.smoothing
    return divide(product, slope, query_shift)


def subtract_largest(tile: Tile, scores: Tensor) -> Tensor | None:
    """Subtract the largest score of each query of an exponential map, in place; returns it (n, chunk, 1)."""
    if not tile.feature_map.exponential:
        return None
    largest = scores.amax(-1, keepdim=True)
    scores -= largest
    return largest


def divide(product: Tensor, slope: Tensor | None, query_shift: Tensor | None) -> Attended:
    """The quotient of [numerator, denominator]; 0 where there was no key to attend to."""
    numerator, denominator = product[..., :-1], product[..., -1:]
    inverse = reciprocal(denominator)
    out = numerator * inverse
    if slope is not None:
        slope = torch.addcmul(slope[..., :-1], out, slope[..., -1:], value=-1).mul_(inverse)
    return Attended(out, denominator, slope, query_shift)


def reciprocal(denominator: Tensor) -> Tensor:
    """1 / denominator, and 0 for a query that had no key to attend to."""
    return denominator.reciprocal().masked_fill_(denominator == 0, 0)
