"""Texts as token ids: bytes, characters, or pieces of words, each with the ids that texts do not use."""

from klformer.tokens.base import Tokens
from klformer.tokens.build import make_tokens, tokens_from_json
from klformer.tokens.config import TokensConfig

__all__ = ["Tokens", "TokensConfig", "make_tokens", "tokens_from_json"]
