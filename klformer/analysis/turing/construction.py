"""Theorems 1 and 2 by construction: an encoder-decoder with explicit weights that runs a Turing machine.

One position of the decoder is one step of the machine. Its output y_i holds the state, the symbol under the head, the
last move and the cell of the head; y_(i+1) follows from y_0 ... y_i by

    encoder     x_j = embedding of symbol j + positions;  K_e, V_e = ReLU networks of x_j
    layer 1     a = y_i + positions + CrossAtt;           z1 = a + O_1(a): next state, symbol to write, move, new cell
    layer 2     p = z1_i + SelfAtt(z1_0 ... z1_i);        a = p + CrossAtt;  z2 = a + O_2(a): symbol in the new cell
    output      y_(i+1) = ReLU network of z2

with O_1 and O_2 networks of one hidden layer of perceptrons, f_perc(x) = 1 if x > 0 else 0. Everything is a product
with one of the matrices below; what the machine does is in the weights of O_1 only. The decoder first copies its input
from the encoder, in a state of its own, q_copy, which is the zero vector, as is the blank.

Two constructions:

    appendix      the paper's, with its slips put right. The symbol in the new cell is the one written at the last
                  visit; among the visits to a cell, attention takes the last by a term 1/(j+1) in the keys.
    telescoping   not in the paper. The values are what each visit changed, [[v]] - [[s]]; summed over all visits to a
                  cell they telescope to the symbol in it. There is no tie to break, and no temperature or threshold
                  depends on the number of steps.

Attentions whose values are zero (the encoder's, and the self-attention of layer 1) add nothing and are left out, as are
the coordinates of queries, keys and values that are zero for all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from klformer.analysis.turing.attention import Array, GaussianAttention, Memory
from klformer.analysis.turing.machine import Configuration, TuringMachine
from klformer.checks import check_choice

#: The state in which the decoder copies its input; not one of the machine's.
COPY = "(copy)"
ConstructionName = Literal["appendix", "telescoping"]
CONSTRUCTIONS: tuple[ConstructionName, ...] = ("appendix", "telescoping")
#: Weight that keeps what the encoder says from counting outside q_copy in the telescoping construction, however wrong
#: an estimate of it is.
GATE = 2**40
HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Printed:
    """Slips of the appendix to put back in, so that tests can show each failing. docs/turing.md explains them."""

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


Number = int | Fraction


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
        w_in, bias, w_out = _zeros(len(self.units), inputs), _zeros(len(self.units)), _zeros(outputs, len(self.units))
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
        vector = _zeros(self.layout.size)
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


def build(
    machine: TuringMachine, construction: ConstructionName = "telescoping", printed: Printed | None = None
) -> TuringTransformer:
    """The weights for a machine, exact.

    Args:
        construction: "appendix" or "telescoping", see the top of this file.
        printed: Slips to put back in; only the appendix's construction has any.
    """
    check_choice("construction", construction, CONSTRUCTIONS)
    if construction == "telescoping":
        if printed is not None:
            raise ValueError("printed is for the construction 'appendix', got it with 'telescoping'")
        return _Telescoping(machine, Printed()).build()
    return _Appendix(machine, printed or Printed()).build()


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, dtype=int).astype(object)


class _Builder:
    """What both constructions share: encoder, cross attention, and the lookup of what the machine does."""

    def __init__(self, machine: TuringMachine, printed: Printed) -> None:
        self.machine = machine
        self.printed = printed
        self.num_states, self.num_symbols = len(machine.states), len(machine.symbols)
        self.layout = self.make_layout()

    def make_layout(self) -> Layout:
        raise NotImplementedError

    def build(self) -> TuringTransformer:
        raise NotImplementedError

    def state(self, field: str, name: str) -> int:
        return self.layout[field][self.machine.states.index(name)]

    def symbol(self, field: str, name: str) -> dict[int, Number]:
        """Where a symbol's one is; nowhere for the blank."""
        if name == self.machine.blank:
            return {}
        return {self.layout[field][self.machine.symbols.index(name)]: 1}

    def matrix(self, *rows: Mapping[int, Number]) -> Array:
        """A projection, given what each of its rows picks."""
        result = _zeros(len(rows), self.layout.size)
        for row, entries in enumerate(rows):
            for index, weight in entries.items():
                result[row, index] = weight
        return result

    def pick(self, *indices: int) -> Array:
        return self.matrix(*({index: 1} for index in indices))

    def units(self, outputs: int | None = None) -> Units:
        return Units(self.layout.size, self.layout.size if outputs is None else outputs)

    def embedding(self) -> Array:
        """Symbols one-hot in s2, the blank as zero."""
        return np.stack(
            [self.matrix(self.symbol("s2", name))[0] for name in (*self.machine.symbols, self.machine.blank)]
        )

    def encoder_networks(self) -> tuple[Network, Network]:
        """k_j = position of j; v_j = symbol j and its position. The rest of the printed vectors is zero."""
        position = self.layout.at("x10")
        keys = self.units(outputs=1)
        keys.add({position: 1}, -1 if self.printed.encoder_from_zero else 0, {0: 1})
        values = self.units(outputs=self.num_symbols + 1)
        for row, index in enumerate((*self.layout["s2"], position)):
            values.add({index: 1}, 0, {row: 1})
        return keys.network("relu"), values.network("relu")

    def cross_out(self) -> Array:
        return self.pick(*self.layout["s2"], self.layout.at("x7")).T

    def lookup(self, units: Units, written: Callable[[str, str], Mapping[int, Number]], *, gate: int) -> None:
        """Units that fire for one pair of state and symbol each, and what the machine does then.

        Args:
            written: Outputs for what is written, given state and symbol: that of the tape, or of the encoder in q_copy.
            gate: How strongly any other state speaks against q_copy.
        """
        q1, s1 = self.layout["q1"], self.layout["s1"]
        for (state, name), action in self.machine.rules.items():
            outputs = {**self._consequences(action.state, action.move), **written(state, name)}
            if name == self.machine.blank:
                units.add({self.state("q1", state): 1, **dict.fromkeys(s1, -1)}, -HALF, outputs)
            else:
                units.add({self.state("q1", state): 1, **self.symbol("s1", name)}, -1 - HALF, outputs)
        source = s1 if self.printed.copy_looks_at_tape else self.layout["s2"]
        not_copying: dict[int, Number] = dict.fromkeys(q1, -gate)
        for index, name in zip(source, self.machine.symbols, strict=True):
            units.add({**not_copying, index: 1}, -HALF, {**self._consequences(None, 1), **written(COPY, name)})
        units.add({**not_copying, **dict.fromkeys(source, -1)}, HALF, self._consequences(self.machine.start, -1))

    def _consequences(self, state: str | None, move: int) -> dict[int, Number]:
        outputs: dict[int, Number] = {self.layout.at("x2"): move, self.layout.at("x3"): move}
        if state is not None:
            outputs[self.state("q2", state)] = 1
        return outputs

    def move_bits(self, units: Units, index: int, outputs: Mapping[int, Number]) -> None:
        """A move, -1, 0 or 1, as a sum of two perceptrons, to each output with its weight."""
        for sign in (1, -1):
            units.add({index: sign}, -HALF, {target: sign * weight for target, weight in outputs.items()})

    def keep_signed(self, units: Units, *names: str) -> None:
        """Numbers that can be negative through ReLUs: x = max(0, x) - max(0, -x)."""
        for name in names:
            index = self.layout.at(name)
            units.add({index: 1}, 0, {index: 1})
            if not self.printed.relu_without_sign:
                units.add({index: -1}, 0, {index: -1})

    def keep(self, units: Units, *names: str) -> None:
        for name in names:
            for index in self.layout[name]:
                units.add({index: 1}, 0, {index: 1})


class _Appendix(_Builder):
    """The construction of the paper's appendix, put right."""

    def make_layout(self) -> Layout:
        q, s = self.num_states, self.num_symbols
        output = {"q1": q, "s1": s, "x1": 1, "x2": 1}
        scratch = {"q2": q, "s2": s, "x3": 1, "x4": 1, "x5": 1, "x6": 1, "x7": 1, "s4": s, "x8": 1}
        return Layout(output, scratch)

    def build(self) -> TuringTransformer:
        encoder_key, encoder_value = self.encoder_networks()
        query = self.pick(self.layout.at("x10"))
        return TuringTransformer(
            machine=self.machine,
            layout=self.layout,
            embedding=self.embedding(),
            seed=_zeros(self.layout.size),
            encoder_key=encoder_key,
            encoder_value=encoder_value,
            layers=(
                DecoderLayer(None, query, self.cross_out(), self._first()),
                DecoderLayer(self._look_back(), query, self.cross_out(), self._last_visit()),
            ),
            output=self._output(),
            printed=self.printed,
        )

    def _first(self) -> Network:
        """O_1. To s2 goes what is written, except in q_copy, where the cross attention has put it there."""
        at = self.layout.at
        units = self.units()
        silent = {COPY, self.machine.start} if self.printed.start_writes_nothing else {COPY}

        def written(state: str, name: str) -> Mapping[int, Number]:
            return {} if state in silent else self.symbol("s2", self.machine.rules[state, name].write)

        self.lookup(units, written, gate=1)
        for index in (*self.layout["q1"], *self.layout["s1"]):
            units.add({index: 1}, -HALF, {index: -1})
        self.move_bits(units, at("x1"), {at("x1"): -1, at("x4"): 1})
        return units.network("perceptron")

    def _look_back(self) -> SelfAttention:
        """Lemma S.3: queries (c^(i+1), 0), keys (c^(j), 1/(j+1)), values ([[v^(j)]], j)."""
        at = self.layout.at
        binary = self.printed.binary_projections
        cell: dict[int, Number] = {at("x2"): 1} if binary else {at("x2"): 1, at("x3"): -1}
        time: dict[int, Number] = {at("x10"): 1} if binary else {at("x10"): 1, at("x9"): -1}
        return SelfAttention(
            query=self.matrix({at("x2"): 1}, {}),
            key=self.matrix(cell, {at("x11"): 1}),
            value=self.matrix(*({index: 1} for index in self.layout["s2"]), time),
            out=self.pick(*self.layout["s4"], at("x8")).T,
        )

    def _last_visit(self) -> Network:
        """O_2: the symbol written at the last visit, less one for all symbols if there was none."""
        at = self.layout.at
        units = self.units()
        for source, target in zip(self.layout["q2"], self.layout["q1"], strict=True):
            units.add({source: 1}, -HALF, {target: 1})
        for source, target in zip(self.layout["s4"], self.layout["s1"], strict=True):
            units.add({source: 1}, -HALF, {target: 1})
        # l is i on a first visit and at most i - 1 otherwise; soft attention errs towards earlier visits.
        margin = 2 if self.printed.loose_threshold else Fraction(7, 4)
        units.add({at("x8"): 1, at("x10"): -1}, margin, dict.fromkeys(self.layout["s1"], -1))
        self.move_bits(units, at("x4") if self.printed.old_move else at("x3"), {at("x1"): 1})
        if self.printed.mask is not None:
            rest = range(at("x2") + 1, self.layout.size)
            units.add({}, 1, dict.fromkeys(rest, -self.printed.mask))
        return units.network("perceptron")

    def _output(self) -> Network:
        units = self.units()
        self.keep(units, "q1", "s1")
        self.keep_signed(units, "x1", "x2")
        if self.printed.mask is not None:
            self.keep(units, "scratch", "position")
        return units.network("relu")


class _Telescoping(_Builder):
    """What each visit changed, summed over all visits to a cell.

    Besides state, symbol, move and cell, y_i carries the leftmost and rightmost cell so far and whether this is the
    first visit to the cell. Exactly one of the visits to a cell is, so that with f the attention's mean of that flag
    and d its mean of the changes, the cell holds symbol a just when d_a > f / 2, whatever the number of visits.
    """

    def make_layout(self) -> Layout:
        q, s = self.num_states, self.num_symbols
        output = {"q1": q, "s1": s, "x1": 1, "x2": 1, "leftmost": 1, "rightmost": 1, "first": 1}
        scratch = {"q2": q, "s2": s, "change": s, "x3": 1, "x7": 1, "found": s, "found_first": 1}
        return Layout(output, scratch)

    def build(self) -> TuringTransformer:
        at = self.layout.at
        encoder_key, encoder_value = self.encoder_networks()
        query = self.pick(at("x10"))
        look_back = SelfAttention(
            query=self.pick(at("x2")),
            key=self.matrix({at("x2"): 1, at("x3"): -1}),
            value=self.pick(*self.layout["change"], at("first")),
            out=self.pick(*self.layout["found"], at("found_first")).T,
        )
        return TuringTransformer(
            machine=self.machine,
            layout=self.layout,
            embedding=self.embedding(),
            seed=self.pick(at("first"))[0],
            encoder_key=encoder_key,
            encoder_value=encoder_value,
            layers=(
                DecoderLayer(None, query, self.cross_out(), self._first()),
                DecoderLayer(look_back, query, self.cross_out(), self._all_visits()),
            ),
            output=self._output(),
            printed=self.printed,
        )

    def _first(self) -> Network:
        at = self.layout.at
        units = self.units()

        def written(state: str, name: str) -> Mapping[int, Number]:
            blank = self.machine.blank
            before, after = (blank, name) if state == COPY else (name, self.machine.rules[state, name].write)
            if before == after:
                return {}
            return {**self.symbol("change", after), **dict.fromkeys(self.symbol("change", before), -1)}

        self.lookup(units, written, gate=GATE)
        for index in (*self.layout["q1"], *self.layout["s1"]):
            units.add({index: 1}, -HALF, {index: -1})
        self.move_bits(units, at("x1"), {at("x1"): -1})
        return units.network("perceptron")

    def _all_visits(self) -> Network:
        """O_2. To s1 go [d_a > f / 2] + [f > 0] - 1: 0 if the cell does not hold a, else 1, or -1 if f is negative.

        With exact weights f is positive. Estimated ones can sum to something negative, by which the attention has then
        divided; both d_a and f have changed their signs, and which symbol is there can still be seen.
        """
        at = self.layout.at
        units = self.units()
        for source, target in zip(self.layout["q2"], self.layout["q1"], strict=True):
            units.add({source: 1}, -HALF, {target: 1})
        for source, target in zip(self.layout["found"], self.layout["s1"], strict=True):
            units.add({source: 1, at("found_first"): -HALF}, 0, {target: 1})
        units.add({at("found_first"): 1}, 0, dict.fromkeys(self.layout["s1"], 1))
        units.add({}, 1, dict.fromkeys(self.layout["s1"], -1))
        first = at("first")
        units.add({first: 1}, -HALF, {first: -1})
        for edge, sign in (("rightmost", 1), ("leftmost", -1)):
            # On a first visit the head has left the cells so far.
            units.add({at("x2"): sign, at(edge): -sign}, -HALF, {at(edge): sign, first: 1})
        self.move_bits(units, at("x3"), {at("x1"): 1})
        return units.network("perceptron")

    def _output(self) -> Network:
        units = self.units()
        self.keep(units, "q1", "first")
        self.keep_signed(units, "x1", "x2", "leftmost", "rightmost")
        for index in self.layout["s1"]:
            # |s1|, and 0 on a first visit, when what attention found is of no account.
            for sign in (1, -1):
                units.add({index: sign, self.layout.at("first"): -1}, 0, {index: 1})
        return units.network("relu")
