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

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Literal

import numpy as np

from klformer.checks import check_choice
from klformer.errors import ArgumentError
from research.turing.attention import Array
from research.turing.machine import TuringMachine
from research.turing.transformer import (
    COPY,
    DecoderLayer,
    Layout,
    Network,
    Number,
    Printed,
    SelfAttention,
    TuringTransformer,
    Units,
    zeros,
)

ConstructionName = Literal["appendix", "telescoping"]
CONSTRUCTIONS: tuple[ConstructionName, ...] = ("appendix", "telescoping")
#: Weight that keeps what the encoder says from counting outside q_copy in the telescoping construction, however wrong
#: an estimate of it is.
GATE = 2**40
HALF = Fraction(1, 2)


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
            raise ArgumentError("printed is for the construction 'appendix', got it with 'telescoping'")
        return _Telescoping(machine, Printed()).build()
    return _Appendix(machine, printed or Printed()).build()


class _Builder(ABC):
    """What both constructions share: encoder, cross attention, and the lookup of what the machine does."""

    def __init__(self, machine: TuringMachine, printed: Printed) -> None:
        self.machine = machine
        self.printed = printed
        self.num_states, self.num_symbols = len(machine.states), len(machine.symbols)
        self.layout = self.make_layout()

    @abstractmethod
    def make_layout(self) -> Layout:
        """The parts of a vector."""

    @abstractmethod
    def build(self) -> TuringTransformer:
        """All weights."""

    def state(self, field: str, name: str) -> int:
        return self.layout[field][self.machine.states.index(name)]

    def symbol(self, field: str, name: str) -> dict[int, Number]:
        """Where a symbol's one is; nowhere for the blank."""
        if name == self.machine.blank:
            return {}
        return {self.layout[field][self.machine.symbols.index(name)]: 1}

    def matrix(self, *rows: Mapping[int, Number]) -> Array:
        """A projection, given what each of its rows picks."""
        result = zeros(len(rows), self.layout.size)
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
            seed=zeros(self.layout.size),
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
