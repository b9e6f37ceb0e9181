"""What turns texts into ids is: a vocabulary, with ids of its own for padding, the separator of two texts and the
mask."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
        >>> tokens.encode_pairs([("to", "be")], max_len=4)[0].tolist()  # the longer one is cut
        [117, 112, 257, 99]
        >>> tokens_from_json(tokens.as_json()).kind
        'bytes'
    """

    #: As the command line and JSON name it.
    kind: ClassVar[str]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, those that no text has among them."""

    @property
    @abstractmethod
    def separator(self) -> int:
        """The id between the two texts of a pair."""

    @property
    @abstractmethod
    def mask(self) -> int:
        """The id that stands for a hidden token."""

    @property
    @abstractmethod
    def specials(self) -> tuple[int, ...]:
        """Ids that mean no piece of text, such as these two; they are never hidden and never guessed."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of every text, without any that is special for its place.

        Args:
            texts: N of them.

        Returns:
            N arrays of int64, each as long as its text has tokens.
        """

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """All that it takes to be the same again.

        Returns:
            What JSON can hold, with `kind`; `tokens_from_json` reads it.
        """

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_len: int) -> list[Ids]:
        """Two texts in one sequence, the separator between them; the longer one is cut until both fit.

        Args:
            pairs: N pairs of texts.
            max_len: Longest sequence, with the separator.
        """
        first, second = (self.encode([pair[side] for pair in pairs]) for side in (0, 1))
        return [join(one, other, self.separator, max_len) for one, other in zip(first, second, strict=True)]


def join(first: Ids, second: Ids, separator: int, max_len: int) -> Ids:
    """One sequence of two: the separator between them, and the longer one cut until both fit in max_len."""
    room = max_len - 1
    kept = min(len(first), max(room - len(second), -(-room // 2)))
    return np.concatenate([first[:kept], np.array([separator], np.int64), second[: room - kept]])
