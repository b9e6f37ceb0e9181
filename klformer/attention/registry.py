"""Attentions by their names: what they are made of, their options, and how one is built or registered."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from klformer.attention.base import AttentionMechanism, AttentionSizes, Capabilities
from klformer.checks import suggestion
from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.registry import Registry


@dataclass(frozen=True)
class AttentionEntry:
    """An attention that can be built by name."""

    #: Called with the sizes, and with options as keywords.
    build: Callable[..., AttentionMechanism]
    mechanism: type[AttentionMechanism]
    #: Options besides the sizes, with their defaults.
    options: Mapping[str, Any]
    summary: str


ATTENTIONS: Registry[AttentionEntry] = Registry("attention")


def register_attention(name: str, mechanism: type[AttentionMechanism], summary: str) -> None:
    """Give a mechanism a name. Its options are the keywords of its constructor, with their defaults.

    Args:
        name: On the command line, and for `build_attention`.
        mechanism: A subclass of `AttentionMechanism`; its docstring has an example.
        summary: What `klformer list` says of it.

    Raises:
        ArgumentError: the name is taken, or an option has no default.

    Examples:
        >>> import klformer
        >>> softmax = type(klformer.build_attention("softmax", num_heads=1, head_dim=4))
        >>> klformer.register_attention("also-softmax", softmax, "the same by another name")
        >>> "also-softmax" in klformer.attention_names()
        True
    """
    options = keyword_options(mechanism)
    ATTENTIONS.add(name, AttentionEntry(mechanism, mechanism, options, summary))


def keyword_options(kind: type, *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keywords of a constructor with their defaults, without those that are named in `but`.

    Raises:
        ArgumentError: one has no default.
    """
    keywords = [
        p for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in but
    ]
    for parameter in keywords:
        if parameter.default is parameter.empty:
            raise ArgumentError(f"{kind.__name__}: the option {parameter.name!r} must have a default")
    return {parameter.name: parameter.default for parameter in keywords}


def attention_names() -> list[str]:
    """The names that `build_attention` knows.

    Examples:
        >>> import klformer
        >>> klformer.attention_names()[:3]
        ['gmm-rks', 'fastfood-rks', 'generative-rks']
    """
    return list(ATTENTIONS)


def attention_options(name: str) -> dict[str, Any]:
    """The options of an attention with their defaults, besides num_heads, head_dim, value_dim and max_len.

    Args:
        name: One of `attention_names()`.

    Raises:
        ArgumentError: for an unknown name.

    Examples:
        >>> import klformer
        >>> klformer.attention_options("linformer")["rank"]
        16
    """
    return dict(ATTENTIONS[name].options)


def attention_capabilities(name: str, **options: Any) -> Capabilities:
    """What an attention can do with these options, without building one.

    Args:
        name: One of `attention_names()`.
        options: What `attention_options(name)` lists.

    Raises:
        ArgumentError: for an unknown name.
        ArgumentTypeError: for an option that the attention does not have.

    Examples:
        >>> import klformer
        >>> klformer.attention_capabilities("linformer").causal
        False
    """
    entry = ATTENTIONS[name]
    _check_options(name, options)
    return entry.mechanism.capabilities(**{**entry.options, **options})


def build_attention(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    max_len: int | None = None,
    **options: Any,
) -> AttentionMechanism:
    """Build an attention by its name in the paper.

    Args:
        name: One of `attention_names()`.
        num_heads: Heads H.
        head_dim: Size D of queries and keys.
        value_dim: Size E of values; D if None.
        max_len: Longest sequence that will be seen; only some mechanisms need it.
        options: What `attention_options(name)` lists.

    Raises:
        ArgumentError: for an unknown name or a value that is not allowed.
        ArgumentTypeError: for an option that the attention does not have.

    Examples:
        >>> import klformer
        >>> attention = klformer.build_attention("gmm-rks", num_heads=4, head_dim=16, num_frequencies=64)
    """
    entry = ATTENTIONS[name]
    _check_options(name, options)
    return entry.build(AttentionSizes(num_heads, head_dim, value_dim, max_len), **options)


def unknown_option(name: str, options: Iterable[str]) -> str | None:
    """What is wrong with the names of options of an attention; None if it has all of them."""
    known = ATTENTIONS[name].options
    for option in options:
        if option not in known:
            allowed = ", ".join(known) or "none"
            return f"{name} has no option {option!r}{suggestion(option, known) or '.'} Options: {allowed}"
    return None


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    if problem := unknown_option(name, options):
        raise ArgumentTypeError(problem)
