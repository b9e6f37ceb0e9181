"""Tokens that need no training: bytes, and characters."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from klformer.lab.tokens.base import Ids, Tokens


class Bytes(Tokens):
    """Bytes of UTF-8: id = byte + 1, as in Long Range Arena; 0 is padding, 257 the separator, 258 the mask."""

    kind: ClassVar[str] = "bytes"

    @property
    def vocab_size(self) -> int:
        return 259

    @property
    def separator(self) -> int:
        return 257

    @property
    def mask(self) -> int:
        return 258

    @property
    def specials(self) -> tuple[int, ...]:
        return (0, 257, 258)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        # A file in another encoding may hold half of a surrogate pair, which has no UTF-8 of its own.
        return [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int64) + 1 for text in texts]

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


class Characters(Tokens):
    """The characters of the training texts, the most frequent first; 0 is padding, 1 any other character, 2 the
    separator, 3 the mask.

    Args:
        characters: All that have an id, in the order of their ids.
    """

    kind: ClassVar[str] = "characters"

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._ids = {character: number for number, character in enumerate(characters, start=4)}

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int) -> "Characters":
        """The characters of some texts, so many with the special ones at most."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        # Among equals in the order of Unicode: the same texts in another order give the same ids.
        ranked = sorted(counts, key=lambda character: (-counts[character], character))
        return cls("".join(ranked[: vocab_size - 4]))

    @property
    def vocab_size(self) -> int:
        return 4 + len(self.characters)

    @property
    def separator(self) -> int:
        return 2

    @property
    def mask(self) -> int:
        return 3

    @property
    def specials(self) -> tuple[int, ...]:
        return (0, 1, 2, 3)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array([self._ids.get(character, 1) for character in text], np.int64) for text in texts]

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}
