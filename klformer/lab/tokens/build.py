"""Tokens from a configuration and texts to learn from, or from what a run remembers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from klformer.config import Config
from klformer.errors import ArgumentError, RunError
from klformer.lab.tokens.base import Bytes, Characters, Tokens

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


def make_tokens(config: TokensConfig, texts: Iterable[str]) -> Tokens:
    """Make the tokens of a configuration; texts are looked at only if there is something to learn from them.

    Args:
        config: Which kind of tokens, and how many.
        texts: Those of training.

    Raises:
        ArgumentError: a file is given for tokens that have none.
        DataError: the file is missing or malformed.

    Examples:
        >>> from klformer.lab.tokens import TokensConfig, make_tokens
        >>> tokens = make_tokens(TokensConfig(kind="characters"), ["abba"])
        >>> tokens.vocab_size, tokens.mask, tokens.encode(["ab?"])[0].tolist()
        (6, 3, [4, 5, 1])
    """
    if config.kind in ("bytes", "characters"):
        if config.file is not None:
            raise ArgumentError(
                f"data.tokens.file is for --data.tokens.kind wordpiece or bpe; {config.kind} have no vocabulary file"
            )
        return Bytes() if config.kind == "bytes" else Characters.learn(texts, config.vocab_size)
    # Imported here: bytes and characters do without it.
    from klformer.lab.tokens.subwords import Subwords

    if config.file is not None:
        return Subwords.read(config.file.expanduser(), lowercase=config.lowercase)
    return Subwords.learn(texts, kind=config.kind, vocab_size=config.vocab_size, lowercase=config.lowercase)


def tokens_from_json(content: dict[str, Any]) -> Tokens:
    """Make the tokens that `as_json` describes.

    Args:
        content: What `Tokens.as_json` gave.

    Raises:
        RunError: it does not.

    Examples:
        >>> from klformer.lab.tokens import TokensConfig, make_tokens, tokens_from_json
        >>> tokens = make_tokens(TokensConfig(kind="characters"), ["abba"])
        >>> tokens_from_json(tokens.as_json()).encode(["ab"])[0].tolist()
        [4, 5]
    """
    kind = content.get("kind")
    if kind == Bytes.kind:
        return Bytes()
    if kind == Characters.kind:
        return Characters(content["characters"])
    from klformer.lab.tokens.subwords import Subwords

    if kind != Subwords.kind:
        raise RunError(f"unknown tokens {kind!r}; a run of another version of klformer")
    return Subwords.from_json(content)
