"""Corpora: found, tokenised once, mapped from disk, cut into blocks; and what is wrong is said."""

import numpy as np
import pytest

from klformer.errors import DataError, FileError
from klformer.lab.tasks import build_task
from klformer.lab.tasks.corpus import CorpusData

TEXT = "the kernel of attention is learned from data\n\n = A title = \nand <unk> is no word\n" * 60


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KLFORMER_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def corpus(**config):
    sizes = {"max_len": 16, "tokens": {"kind": "wordpiece", "vocab_size": 80}}
    return build_task("corpus", CorpusData(**sizes | config), quiet=True)


def test_blocks_are_the_text(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    task = corpus(train=tmp_path / "book.txt", tokens={"kind": "bytes"})
    train, validation, test = (task.load(split) for split in ("train", "validation", "test"))
    stream = np.concatenate([part.first.values for part in (train, test, validation)])
    plain = "".join(line.strip() for line in TEXT.splitlines()).encode()
    assert bytes((stream - 1).astype(np.uint8)) == plain[: len(stream)]
    assert len(plain) - len(stream) < 16
    assert len(validation) == len(test) == round(0.1 * (len(plain) // 16))
    assert task.detail() == "book"


@pytest.mark.parametrize("kind", ["raw", "tokens"])
def test_wikitext(tmp_path, kind):
    for name in ("train", "valid", "test"):
        (tmp_path / f"wiki.{name}.{kind}").write_text(TEXT)
    task = corpus(root=tmp_path)
    assert (task.validation_source(), task.test_source(), task.detail()) == ("file", "file", tmp_path.name)
    ids = set(task.load("train").first.values.tolist())
    unknown = 1
    assert (unknown in ids) == (kind == "tokens"), "a word that was left out is no word to guess"
    assert unknown in task.shape().specials


def test_it_is_tokenised_once_and_mapped(tmp_path, cache, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT)
    first = corpus(train=tmp_path)
    knowledge = first.learn()
    first.know(knowledge)
    ids = first.load("train").first.values
    assert ids.dtype == np.uint16
    assert not ids.flags.writeable, "it is a file that is mapped"
    (stored,) = cache.iterdir()
    again = corpus(train=tmp_path)
    again.know(knowledge)
    monkeypatch.setattr("klformer.lab.tasks.corpus.np.concatenate", lambda *_: pytest.fail("tokenised again"))
    assert np.array_equal(again.load("train").first.values, ids)
    stored.write_bytes(b"torn")
    with pytest.raises(FileError, match=r"\.arrow is damaged: .*; delete it and it is made again"):
        again.load("train")


def test_other_texts_and_other_tokens_are_other_ids(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    corpus(train=path, tokens={"kind": "bytes"}).load("train")
    corpus(train=path, tokens={"kind": "characters"}).load("train")
    path.write_text(TEXT + "more\n")
    corpus(train=path, tokens={"kind": "bytes"}).load("train")
    assert len(list(cache.iterdir())) == 3


def test_an_interrupted_tokenisation_leaves_nothing(tmp_path, cache):
    (tmp_path / "a.txt").write_bytes(b"good line\n" * 3000 + b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"a\.txt, line \d+: is not utf-8: .*--data\.encoding latin-1"):
        corpus(train=tmp_path / "a.txt", tokens={"kind": "bytes"}).load("train")
    assert list(cache.iterdir()) == []


def test_what_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"has none of wiki\.train\.raw, wiki\.train\.tokens, \*\.txt"):
        corpus(root=tmp_path).load("train")
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"has 5 tokens, fewer than one block of 16; --data\.max-len"):
        corpus(train=tmp_path / "a.txt", tokens={"kind": "bytes"}).load("train")
