"""Tokens give the same ids after they were stored, keep special ids to themselves, and join pairs within a length."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klformer.errors import ArgumentError, DataError
from klformer.lab.tokens import TokensConfig, make_tokens, tokens_from_json
from klformer.lab.tokens.base import join

TEXTS = ["the kernel of a transformer", "The kernels, learned: naïve café", "transformers learn kernels"] * 5
KINDS = ["bytes", "characters", "wordpiece", "bpe"]


@pytest.mark.parametrize("kind", KINDS)
def test_stored_tokens_are_the_same(kind):
    tokens = make_tokens(TokensConfig(kind=kind, vocab_size=300), TEXTS)
    again = tokens_from_json(json.loads(json.dumps(tokens.as_json())))
    unseen = [*TEXTS, "日本語 and \x00 unseen", ""]
    for one, other in zip(tokens.encode(unseen), again.encode(unseen), strict=True):
        assert one.tolist() == other.tolist()
        assert ((one >= 0) & (one < tokens.vocab_size)).all()
        assert not {tokens.separator, tokens.mask} & set(one.tolist())
    assert (again.vocab_size, again.separator, again.mask) == (tokens.vocab_size, tokens.separator, tokens.mask)
    assert {tokens.separator, tokens.mask} < set(tokens.specials)
    assert tokens.vocab_size <= 300


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_what_is_learned_from_the_same_texts_is_the_same(kind):
    config = TokensConfig(kind=kind, vocab_size=300)
    texts = [*TEXTS, "5°C±2", "→a⊕b®", "日本語x"]
    first = make_tokens(config, texts).as_json()
    for _ in range(5):  # the library's hash tables are in another order every time
        assert make_tokens(config, texts[::-1]).as_json() == first


def test_bytes_are_those_of_long_range_arena():
    tokens = make_tokens(TokensConfig(), [])
    assert tokens.encode(["aé"])[0].tolist() == [98, 0xC3 + 1, 0xA9 + 1]


def test_characters_do_not_depend_on_the_order_of_texts():
    config = TokensConfig(kind="characters", vocab_size=16)
    tokens = make_tokens(config, TEXTS)
    assert tokens.as_json() == make_tokens(config, TEXTS[::-1]).as_json()
    assert tokens.encode(["é" * 2])[0].tolist() == [1, 1], "12 characters have an id, and this is not among them"


def test_word_pieces_of_a_given_vocabulary(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nkernel\n##s\nthe\n")
    tokens = make_tokens(TokensConfig(kind="wordpiece", file=path), [])
    assert tokens.encode(["The kernels x"])[0].tolist() == [7, 5, 6, 1]
    assert (tokens.separator, tokens.mask, tokens.vocab_size) == (3, 4, 8)
    cased = make_tokens(TokensConfig(kind="wordpiece", file=path, lowercase=False), [])
    assert cased.encode(["The kernels"])[0].tolist() == [1, 5, 6]
    stored = tmp_path / "tokenizer.json"
    stored.write_text(json.dumps(tokens.as_json()["tokenizer"]))
    read = make_tokens(TokensConfig(kind="wordpiece", file=stored), [])
    assert read.encode(["The kernels x"])[0].tolist() == [7, 5, 6, 1]


def test_a_tokenizer_without_separator_and_mask_gets_them(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[UNK]\na\nb\n")
    tokens = make_tokens(TokensConfig(kind="wordpiece", file=path), [])
    assert (tokens.separator, tokens.mask, tokens.vocab_size) == (3, 4, 5)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("vocab.txt", b"a\nb\n", r"vocab.txt: has no line \[UNK\]"),
        ("vocab.txt", b"[UNK]\n\xff\n", "must be a vocab.txt in UTF-8"),
        ("tokenizer.json", b"{}", r"tokenizer.json: is not a tokenizer.json"),
        ("other.txt", None, r"other.txt: is no file; data.tokens.file must be"),
    ],
)
def test_wrong_files(tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        make_tokens(TokensConfig(kind="wordpiece", file=tmp_path / name), [])
    with pytest.raises(ArgumentError, match=r"data\.tokens\.file is for --data\.tokens\.kind wordpiece or bpe"):
        make_tokens(TokensConfig(kind="bytes", file=tmp_path / name), [])


@given(st.integers(0, 20), st.integers(0, 20), st.integers(3, 30))
def test_pairs_fit_and_lose_no_more_than_they_must(first, second, max_len):
    joined = join(np.full(first, 1), np.full(second, 2), 9, max_len).tolist()
    ones, twos = joined.count(1), joined.count(2)
    assert joined == [1] * ones + [9] + [2] * twos
    assert len(joined) == min(max_len, first + second + 1)
    # The shorter one is cut only if both have the same room.
    assert ones == first or ones >= (max_len - 1) // 2
    assert twos == second or twos >= (max_len - 1) // 2
