"""What a user can choose about tokens."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from klformer.config import Config

Kind = Literal["bytes", "characters", "wordpiece", "bpe"]


class TokensConfig(Config):
    """How a text becomes a sequence.

    Examples:
        >>> from klformer.lab.tokens import TokensConfig
        >>> TokensConfig().kind, TokensConfig(kind="bpe", vocab_size=1000).vocab_size
        ('bytes', 1000)
    """

    kind: Kind = "bytes"
    """bytes: of UTF-8, any language and no vocabulary. characters: those of the training texts. wordpiece and bpe:
    pieces of words, learned from the training texts and stored with the run, or read from `file`."""

    file: Path | None = None
    """A vocabulary that is there already: vocab.txt of BERT (wordpiece) or a tokenizer.json (wordpiece or bpe)."""

    vocab_size: int = Field(8192, ge=16)
    """Number of characters or pieces that are learned, at most."""

    lowercase: bool = True
    """Make no difference between upper and lower case, and none by accents; for wordpiece and bpe that are learned, or
    read from a vocab.txt."""
