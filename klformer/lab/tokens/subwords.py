"""Pieces of words by the library `tokenizers`: WordPiece and BPE, learned here or read from somebody's file."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from klformer.errors import DataError
from klformer.lab.tokens.base import Ids, Tokens

PADDING, UNKNOWN, START, SEPARATOR, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
#: What other people call them.
ALIASES = {SEPARATOR: "</s>", MASK: "<mask>", PADDING: "<pad>", UNKNOWN: "<unk>", START: "<s>"}
#: No text is seen as one line of more characters, so that one file without line ends is no problem of memory.
_LONGEST_TEXT = 1 << 16
#: Characters that word pieces may consist of: the most frequent ones.
_MOST_CHARACTERS = 1000


class Subwords(Tokens):
    """A tokenizer of the library `tokenizers`, with a separator and a mask, which are added if it has none.

    Args:
        tokenizer: The library's own.
        ends: It is that of a pretrained encoder: texts get the tokens around them that the tokenizer itself puts there,
            and nothing is added to its vocabulary.
    """

    kind: ClassVar[str] = "subwords"

    def __init__(self, tokenizer: Tokenizer, *, ends: bool = False) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.separator, self.mask = (self._id(name, needed=not ends) for name in (SEPARATOR, MASK))
        others = [self._id(name, needed=False) for name in (PADDING, UNKNOWN, START)]
        self.specials = tuple(sorted({number for number in (self.separator, self.mask, *others) if number >= 0}))
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))

    @classmethod
    def learn(cls, texts: Iterable[str], *, kind: str, vocab_size: int, lowercase: bool) -> "Subwords":
        """Learn pieces from texts."""
        if kind == "wordpiece":
            return cls(_learn_wordpiece(texts, vocab_size, lowercase=lowercase))
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        if lowercase:
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
            )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(_pieces(texts), trainer)
        return cls(tokenizer)

    @classmethod
    def read(cls, path: Path, *, lowercase: bool) -> "Subwords":
        """Read a tokenizer.json, or a vocab.txt with one piece a line as BERT has it."""
        if not path.is_file():
            raise DataError("is no file; data.tokens.file must be a vocab.txt or a tokenizer.json", file=path)
        if path.suffix == ".json":
            try:
                return cls(Tokenizer.from_file(str(path)))
            except Exception as error:  # the library raises Exception itself
                raise DataError(f"is not a tokenizer.json of the library tokenizers: {error}", file=path) from error
        try:
            pieces = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise DataError("must be a vocab.txt in UTF-8, one piece a line, or a tokenizer.json", file=path) from error
        vocabulary = {piece.rstrip("\r"): number for number, piece in enumerate(pieces) if piece}
        if UNKNOWN not in vocabulary:
            raise DataError(f"has no line {UNKNOWN}: a vocab.txt must have BERT's special pieces", file=path)
        model = models.WordPiece(vocabulary, unk_token=UNKNOWN)
        return cls(_bert(model, lowercase=lowercase))

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode_within(self, texts: Sequence[str], max_len: int) -> list[Ids]:
        return self._whole(texts, max_len) if self._ends else super().encode_within(texts, max_len)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_len: int) -> list[Ids]:
        return self._whole(pairs, max_len) if self._ends else super().encode_pairs(pairs, max_len)

    def _whole(self, texts: Sequence[Any], max_len: int) -> list[Ids]:
        """Encode texts or pairs of them, cut so that they fit with the tokens around them."""
        self._tokenizer.enable_truncation(max_len)
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        finally:
            self._tokenizer.no_truncation()
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def as_json(self) -> dict[str, Any]:
        content = {"kind": self.kind, "tokenizer": json.loads(self._tokenizer.to_str())}
        return {**content, "ends": True} if self._ends else content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Subwords":
        """Make the tokenizer that `as_json` describes."""
        return cls(Tokenizer.from_str(json.dumps(content["tokenizer"])), ends=content.get("ends", False))

    def _id(self, name: str, *, needed: bool) -> int:
        """Return the id of a special piece by its name or its alias; -1 if there is none and none is needed."""
        for candidate in (name, ALIASES[name]):
            number = self._tokenizer.token_to_id(candidate)
            if number is not None:
                return int(number)
        if not needed:
            return -1
        self._tokenizer.add_special_tokens([name])
        return self._id(name, needed=False)


def _bert(model: models.WordPiece, *, lowercase: bool) -> Tokenizer:
    """Make a WordPiece tokenizer around which text is prepared as BERT does it."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _learn_wordpiece(texts: Iterable[str], vocab_size: int, *, lowercase: bool) -> Tokenizer:
    """Learn WordPiece, the same for the same texts.

    The library gives inner characters (##a, ##b, ...) their ids in the order of a hash table, which is another one
    every time, and breaks ties by ids. They are therefore named beforehand, as if they were special, and the
    vocabulary that comes out is put into a tokenizer that knows nothing of that.
    """
    normalise = normalizers.BertNormalizer(lowercase=lowercase).normalize_str
    kept = list(_pieces(texts))
    counts: Counter[str] = Counter()
    for text in kept:
        counts.update(normalise(text))
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    room = max(0, min(_MOST_CHARACTERS, (vocab_size - len(SPECIALS)) // 2))
    alphabet = sorted(character for character in ranked[: room + 1] if not character.isspace())
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    # Punctuation is a word of its own and never inside of one; symbols such as a degree sign are.
    inner = [f"##{character}" for character in alphabet if len(split(f"a{character}a")) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *alphabet, *inner],
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    scratch = _bert(models.WordPiece(unk_token=UNKNOWN), lowercase=lowercase)
    scratch.train_from_iterator(kept, trainer)
    return _bert(models.WordPiece(scratch.get_vocab(), unk_token=UNKNOWN), lowercase=lowercase)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (text[start : start + _LONGEST_TEXT] for start in range(0, len(text), _LONGEST_TEXT))
