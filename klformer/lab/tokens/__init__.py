"""Texts as token ids: bytes, characters, or pieces of words, each with the ids that texts do not use."""

from klformer.lab.tokens.base import Tokens
from klformer.lab.tokens.build import TokensConfig, make_tokens, tokens_from_json

__all__ = ["Tokens", "TokensConfig", "make_tokens", "tokens_from_json"]
