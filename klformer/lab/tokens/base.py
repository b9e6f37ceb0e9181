"""What turns texts into ids: a vocabulary, with ids of its own for padding, the separator of two texts and the mask.

Bytes and characters are the plain ones.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Tokens(ABC):
    """From texts to ids.

    Examples:
        >>> from klformer.lab.tokens import TokensConfig, make_tokens, tokens_from_json
        >>> tokens = make_tokens(TokensConfig(kind="bytes"), [])
        >>> tokens.vocab_size, tokens.separator, tokens.mask, tokens.specials
        (259, 257, 258, (0, 257, 258))
        >>> tokens.encode(["to", "be"])[0].tolist()
        [117, 112]
        >>> tokens.encode_within(["to"], max_len=1)[0].tolist()
        [117]
        >>> tokens.encode_pairs([("to", "be")], max_len=4)[0].tolist()  # the longer one is cut
        [117, 112, 257, 99]
        >>> tokens_from_json(tokens.as_json()).kind
        'bytes'
    """

    #: As the command line and JSON name it.
    kind: ClassVar[str]

    #: Number of ids, those that no text has among them.
    vocab_size: int
    #: The id between the two texts of a pair.
    separator: int
    #: The id that stands for a hidden token.
    mask: int
    #: Ids that mean no piece of text, such as these two; they are never hidden and never guessed.
    specials: tuple[int, ...]

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Encode every text, without any id that is special for its place.

        Args:
            texts: N of them.

        Returns:
            N arrays of int64, each as long as its text has tokens.
        """

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return all that it takes to be the same again.

        Returns:
            What JSON can hold, with `kind`; `tokens_from_json` reads it.
        """

    def encode_within(self, texts: Sequence[str], max_len: int) -> list[Ids]:
        """Encode every text, cut at `max_len`.

        Args:
            texts: N of them.
            max_len: Longest sequence.
        """
        return [ids[:max_len] for ids in self.encode(texts)]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_len: int) -> list[Ids]:
        """Encode two texts in one sequence, the separator between them; the longer one is cut until both fit.

        Args:
            pairs: N pairs of texts.
            max_len: Longest sequence, with the separator.
        """
        first, second = (self.encode([pair[side] for pair in pairs]) for side in (0, 1))
        return [join(one, other, self.separator, max_len) for one, other in zip(first, second, strict=True)]


def join(first: Ids, second: Ids, separator: int, max_len: int) -> Ids:
    """Join two sequences: the separator between them, and the longer one cut until both fit in max_len."""
    room = max_len - 1
    kept = min(len(first), max(room - len(second), -(-room // 2)))
    return np.concatenate([first[:kept], np.array([separator], np.int64), second[: room - kept]])


class Bytes(Tokens):
    """Bytes of UTF-8: id = byte + 1, as in Long Range Arena; 0 is padding, 257 the separator, 258 the mask."""

    kind: ClassVar[str] = "bytes"

    vocab_size = 259
    separator, mask = 257, 258
    specials = (0, 257, 258)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        # A file in another encoding may hold half of a surrogate pair, which has no UTF-8 of its own.
        return [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int64) + 1 for text in texts]

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


class Characters(Tokens):
    """The characters of the training texts, the most frequent first; 0 is padding, 1 any other character, 2 the
    separator, 3 the mask."""

    kind: ClassVar[str] = "characters"
    separator, mask = 2, 3
    specials = (0, 1, 2, 3)

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab_size = 4 + len(characters)
        self._ids = {character: number for number, character in enumerate(characters, start=4)}

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int) -> "Characters":
        """Learn the characters of some texts, so many with the special ones at most."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        # Among equals in the order of Unicode: the same texts in another order give the same ids.
        ranked = sorted(counts, key=lambda character: (-counts[character], character))
        return cls("".join(ranked[: vocab_size - 4]))

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array([self._ids.get(character, 1) for character in text], np.int64) for text in texts]

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}
