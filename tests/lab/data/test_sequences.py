"""The ragged store keeps what it is given, in the smallest type."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klformer.lab.data import Examples, Sequences
from klformer.lab.data.sequences import ByteRows

ROWS = st.lists(st.lists(st.integers(0, 70_000), max_size=7), min_size=1, max_size=9)


@given(ROWS, st.data())
def test_rows_come_back(rows, data):
    sequences = Sequences.from_list([np.array(row, np.int64) for row in rows])
    assert [row.tolist() for row in sequences] == rows
    assert sequences.lengths.tolist() == [len(row) for row in rows]
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
    taken = sequences.take(np.array(indices, np.int64))
    assert [row.tolist() for row in taken] == [rows[i] for i in indices]
    assert taken.values.dtype == sequences.values.dtype


@pytest.mark.parametrize(
    ("largest", "dtype"), [(0, np.uint8), (255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, np.uint32)]
)
def test_smallest_type(largest, dtype):
    assert Sequences.from_list([np.array([0, largest])]).values.dtype == dtype


def test_a_fingerprint_is_that_of_the_data(monkeypatch):
    def print_of(text, second=b"xy", label=0):
        sides = []
        for content in (text, second):
            rows = ByteRows()
            rows.add(content[:2])
            rows.add(content[2:])
            sides.append(rows.as_they_are())
        return Examples(sides[0], np.array([label, 1]), sides[1]).fingerprint()

    for _ in range(2):
        assert print_of(b"some text") == print_of(b"some text")
        others = [print_of(b"some texts"), print_of(b"Some text"), print_of(b"some text", b"xz")]
        assert len({*others, print_of(b"some text"), print_of(b"some text", label=1)}) == 5
        # The same where only some of the tokens are looked at.
        monkeypatch.setattr("klformer.lab.data.sequences._FINGERPRINT_TOKENS", 4)


def test_negative_values_get_a_signed_type():
    sequences = Sequences.from_list([np.array([-1, 200])])
    assert sequences[0].tolist() == [-1, 200]
    assert sequences.values.dtype == np.int16


def test_vectors_and_matrices():
    rows = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    sequences = Sequences.from_matrix(rows)
    assert len(sequences) == 2
    assert sequences.width == 3
    assert (sequences[1] == rows[1]).all()
    assert (sequences.take(np.array([1]))[0] == rows[1]).all()
    assert Sequences.from_list([]).width is None


def test_index_out_of_range():
    with pytest.raises(IndexError, match="sequence 1 of 1"):
        Sequences.from_list([np.array([1])])[1]


def test_bad_stores_are_refused():
    with pytest.raises(ValueError, match="values must be integers"):
        Sequences(np.zeros(3), np.array([0, 3]))
    with pytest.raises(ValueError, match="go from 0 to 3"):
        Sequences(np.zeros(3, np.uint8), np.array([0, 2]))
    with pytest.raises(ValueError, match="must not decrease"):
        Sequences(np.zeros(3, np.uint8), np.array([0, 2, 1, 3]))


def test_examples_must_agree():
    two = Sequences.from_list([np.array([1]), np.array([2, 3])])
    with pytest.raises(ValueError, match=r"must be as many, got \[2, 3\]"):
        Examples(two, np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="int64"):
        Examples(two, np.zeros(2, np.int32))


def test_a_pair_is_as_long_as_its_longer_side():
    first = Sequences.from_list([np.array([1]), np.array([2, 3])])
    second = Sequences.from_list([np.array([4, 5, 6]), np.array([7])])
    pairs = Examples(first, np.array([0, 1]), second)
    assert pairs.lengths.tolist() == [3, 2]
    swapped = pairs.take(np.array([1, 0]))
    assert swapped.targets.tolist() == [1, 0]
    assert swapped.second[0].tolist() == [7]


@pytest.mark.parametrize(("rows", "dtype"), [([b"ab", b"", b"\xfe"], np.uint8), ([b"a\xff"], np.uint16)])
def test_bytes_plus_one(rows, dtype):
    collected = ByteRows()
    for row in rows:
        collected.add(row)
    sequences = collected.plus_one()
    assert [row.tolist() for row in sequences] == [[byte + 1 for byte in row] for row in rows]
    assert sequences.values.dtype == dtype
