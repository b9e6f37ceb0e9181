"""Tokens from a configuration and texts to learn from, or from what a run remembers."""

from collections.abc import Iterable
from typing import Any

from klformer.errors import ArgumentError, RunError
from klformer.lab.tokens.base import Tokens
from klformer.lab.tokens.config import TokensConfig
from klformer.lab.tokens.plain import Bytes, Characters


def make_tokens(config: TokensConfig, texts: Iterable[str]) -> Tokens:
    """The tokens of a configuration; texts are looked at only if there is something to learn from them.

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
    """The tokens that `as_json` describes.

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
