"""An encoder-decoder whose weights are given: its matrices, and how it runs step by step.

`construction` makes the weights and says what is computed; here are only products with them. Weights are exact
(integers and fractions) until they are turned into the numbers that an attention works with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from research.turing.attention import Array, GaussianAttention, Memory
from research.turing.machine import Configuration, TuringMachine

#: The state in which the decoder copies its input; not one of the machine's.
COPY = "(copy)"
Number = int | Fraction


def zeros(*shape: int) -> Array:
    """Exact zeros."""
    return np.zeros(shape, dtype=int).astype(object)


@dataclass(frozen=True)
class Printed:
    """Slips of the appendix to put back in, so that tests can show each failing (research/pages/turing.md)."""

    positions_from_zero: bool = False
    """Embed position i as (1, i, 1/i, 1/i^2) from i = 0 on."""
    encoder_from_zero: bool = False
    """Number the encoder's keys from 0, while the decoder asks for i + 1."""
    copy_looks_at_tape: bool = False
    """Look up what to do in q_copy by the symbol on the tape, not by that of the encoder."""
    start_writes_nothing: bool = False
    """Set the symbol to write to 0 in q_init."""
    residual_skips_self_attention: bool = False
    """Add the layer's input after the cross attention, not the result of the self-attention."""
    binary_projections: bool = False
    """Make the keys and values of layer 2 with partial permutations: c^(j+1) and j + 1 instead of c^(j) and j."""
    loose_threshold: bool = False
    """Test for a first visit by f_perc(l + 2 - (i + 1)), which is f_perc(0) just after a visit."""
    old_move: bool = False
    """Output m^(i-1) instead of m^(i)."""
    relu_without_sign: bool = False
    """Send the move and the cell, which can be negative, through one ReLU."""
    mask: int | None = None
    """Clear the other fields by adding -M before the ReLU, not by giving them no weight; the printed M is negative."""


class Layout:
    """Names for the parts of a vector: what an output holds, what layers put down for each other, and positions.

    Args:
        output: Parts and their sizes that y_i carries from step to step.
        scratch: Parts that are zero in y_i.
    """

    def __init__(self, output: Mapping[str, int], scratch: Mapping[str, int]) -> None:
        self.parts: dict[str, range] = {}
        self.size = 0
        for name, size in (dict(output) | dict(scratch) | dict.fromkeys(("x9", "x10", "x11", "x12"), 1)).items():
            self.parts[name] = range(self.size, self.size + size)
            self.size += size
        self.parts["scratch"] = range(sum(output.values()), self.size - 4)
        self.parts["position"] = range(self.size - 4, self.size)

    def __getitem__(self, name: str) -> range:
        return self.parts[name]

    def at(self, name: str) -> int:
        """The index of a part of size one."""
        (index,) = self.parts[name]
        return index


class Units:
    """Hidden units of a network, one by one, and the two matrices that they make."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.shape = inputs, outputs
        self.units: list[tuple[Mapping[int, Number], Number, Mapping[int, Number]]] = []

    def add(self, inputs: Mapping[int, Number], bias: Number, outputs: Mapping[int, Number]) -> None:
        """A unit f(sum of weight times input + bias) that goes to each output with its weight."""
        self.units.append((inputs, bias, outputs))

    def network(self, activation: Literal["perceptron", "relu"]) -> "Network":
        inputs, outputs = self.shape
        w_in, bias, w_out = zeros(len(self.units), inputs), zeros(len(self.units)), zeros(outputs, len(self.units))
        for row, (incoming, constant, outgoing) in enumerate(self.units):
            bias[row] = constant
            for index, weight in incoming.items():
                w_in[row, index] = weight
            for index, weight in outgoing.items():
                w_out[index, row] = weight
        return Network(w_in, bias, w_out, activation)


@dataclass(frozen=True)
class Network:
    """x -> W_out f(W_in x + b), f the perceptron or the ReLU."""

    w_in: Array
    bias: Array
    w_out: Array
    activation: Literal["perceptron", "relu"]

    def __call__(self, x: Array) -> Array:
        hidden = self.w_in @ x + self.bias
        positive = hidden > 0
        return self.w_out @ (positive.astype(hidden.dtype) if self.activation == "perceptron" else hidden * positive)

    def astype(self, dtype: npt.DTypeLike) -> "Network":
        return Network(self.w_in.astype(dtype), self.bias.astype(dtype), self.w_out.astype(dtype), self.activation)


@dataclass(frozen=True)
class SelfAttention:
    """W_q, W_k, W_v and W_o."""

    query: Array
    key: Array
    value: Array
    out: Array

    def astype(self, dtype: npt.DTypeLike) -> "SelfAttention":
        return SelfAttention(*(matrix.astype(dtype) for matrix in (self.query, self.key, self.value, self.out)))


@dataclass(frozen=True)
class DecoderLayer:
    """The matrices of a layer. Keys and values of the cross attention are the encoder's."""

    self_attention: SelfAttention | None
    """None if its values are zero."""
    cross_query: Array
    cross_out: Array
    feed_forward: Network

    def astype(self, dtype: npt.DTypeLike) -> "DecoderLayer":
        return DecoderLayer(
            None if self.self_attention is None else self.self_attention.astype(dtype),
            self.cross_query.astype(dtype),
            self.cross_out.astype(dtype),
            self.feed_forward.astype(dtype),
        )


@dataclass(frozen=True)
class TuringTransformer:
    """All weights. `build` makes them, `Decoding` uses them."""

    machine: TuringMachine
    layout: Layout
    embedding: Array
    """A row a symbol, the blank last."""
    seed: Array
    """y_0."""
    encoder_key: Network
    encoder_value: Network
    layers: tuple[DecoderLayer, DecoderLayer]
    output: Network
    printed: Printed

    def astype(self, dtype: npt.DTypeLike) -> "TuringTransformer":
        """The same weights as numbers of another type."""
        first, second = self.layers
        return TuringTransformer(
            machine=self.machine,
            layout=self.layout,
            embedding=self.embedding.astype(dtype),
            seed=self.seed.astype(dtype),
            encoder_key=self.encoder_key.astype(dtype),
            encoder_value=self.encoder_value.astype(dtype),
            layers=(first.astype(dtype), second.astype(dtype)),
            output=self.output.astype(dtype),
            printed=self.printed,
        )

    def positions(self, index: int) -> Array:
        """(1, i, 1/i, 1/i^2) in the last four places; i counts from 1."""
        i = index if self.printed.positions_from_zero else index + 1
        vector = zeros(self.layout.size)
        vector[self.layout["position"]] = [1, i, Fraction(1, i), Fraction(1, i * i)]
        return vector.astype(self.seed.dtype)

    def read(self, y: Array) -> Configuration | None:
        """What an output says, or None if it is not the encoding of anything."""
        state = self._name(y[self.layout["q1"]], self.machine.states, COPY)
        symbol = self._name(y[self.layout["s1"]], self.machine.symbols, self.machine.blank)
        move, head = y[self.layout.at("x1")], y[self.layout.at("x2")]
        if state is None or symbol is None or move not in (-1, 0, 1) or head != round(head):
            return None
        if np.any(y[self.layout["scratch"]] != 0) or np.any(y[self.layout["position"]] != 0):
            return None
        return Configuration(state, symbol, int(head), int(move))

    @staticmethod
    def _name(one_hot: Array, names: tuple[str, ...], zero: str) -> str | None:
        ones = [name for name, entry in zip(names, one_hot, strict=True) if entry == 1]
        if sum(bool(entry != 0) for entry in one_hot) != len(ones) or len(ones) > 1:
            return None
        return ones[0] if ones else zero


class Decoding:
    """A word, encoded, and the decoder at work on it: every call of `step` gives the next output.

    Args:
        model: The weights.
        word: The input; a blank is put after it.
        attention: Used for cross and self-attention alike; decides the type of all numbers.
    """

    def __init__(self, model: TuringTransformer, word: str, attention: GaussianAttention) -> None:
        model.machine.check_word(word)
        self.model = model = model.astype(attention.dtype)
        alphabet = (*model.machine.symbols, model.machine.blank)
        self.encoded = attention.memory(len(model.encoder_key.w_out), len(model.encoder_value.w_out), stream=0)
        for index, symbol in enumerate([*word, model.machine.blank]):
            x = model.embedding[alphabet.index(symbol)] + model.positions(index)
            self.encoded.append(model.encoder_key(x), model.encoder_value(x))
        self.written = [
            None if own is None else attention.memory(len(own.key), len(own.value), stream)
            for stream, own in enumerate((layer.self_attention for layer in model.layers), start=1)
        ]
        self.y = model.seed
        self.index = 0

    def step(self) -> Array:
        """Run both layers at the next position.

        Returns:
            y_(i+1), which is the next position's input.
        """
        x = self.y + self.model.positions(self.index)
        for layer, written in zip(self.model.layers, self.written, strict=True):
            x = self._layer(layer, written, x)
        self.y = self.model.output(x)
        self.index += 1
        return self.y

    def _layer(self, layer: DecoderLayer, written: Memory | None, x: Array) -> Array:
        p = x
        if written is not None and layer.self_attention is not None:
            own = layer.self_attention
            # Outputs don't depend on what comes later, so that keys and values of earlier positions are kept.
            written.append(own.key @ x, own.value @ x)
            p = x + own.out @ written.read(own.query @ x)
        cross = layer.cross_out @ self.encoded.read(layer.cross_query @ p)
        a = cross + (x if self.model.printed.residual_skips_self_attention else p)
        return a + layer.feed_forward(a)
