"""Texts as token ids: bytes, characters, or pieces of words, each with the ids that texts do not use."""

from klformer.lab.tokens.base import Tokens
from klformer.lab.tokens.build import make_tokens, tokens_from_json
from klformer.lab.tokens.config import TokensConfig

__all__ = ["Tokens", "TokensConfig", "make_tokens", "tokens_from_json"]
