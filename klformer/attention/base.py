"""What every attention has in common: the interface, its checks, and the registry by name.

Masks: True = keep, everywhere. An attention sees heads only; the projections around it are in `multihead`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from klformer.checks import check_count, suggestion
from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.registry import Registry


class AttentionMechanism(nn.Module, ABC):
    """Attention of several heads: q (B,H,L,D), k (B,H,S,D), v (B,H,S,E) -> (B,H,L,E).

    Args:
        num_heads: Heads H.
        head_dim: Size D of queries and keys.
        value_dim: Size E of values; D if None.
        max_len: Longest sequence that will be seen; `forward` refuses longer ones. Mechanisms whose parameters depend
            on the length need it, the others may leave it out.
    """

    #: Query i can be kept from seeing keys after i.
    supports_causal: bool = True
    #: Sequences can be decoded step by step with a state.
    supports_decoding: ClassVar[bool] = True
    #: Keys may come from another sequence than queries.
    supports_cross: ClassVar[bool] = True
    #: How the time grows with the length L.
    cost: ClassVar[str] = "L"
    #: Parameters depend on the length, so that max_len must be given.
    needs_max_len: ClassVar[bool] = False
    #: Whether queries and keys have any effect. A layer makes no projections for what is not used.
    uses_queries: bool = True
    uses_keys: bool = True

    _anchor: Tensor

    def __init__(
        self, *, num_heads: int, head_dim: int, value_dim: int | None = None, max_len: int | None = None
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        check_count("num_heads", num_heads)
        check_count("head_dim", head_dim)
        check_count("value_dim", value_dim)
        if max_len is not None:
            check_count("max_len", max_len)
        elif self.needs_max_len:
            raise ArgumentError(f"{type(self).__name__} needs max_len: the longest sequence that it will see")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.max_len = max_len
        # Empty; it only remembers the device and the precision that the module was moved to.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries (B, H, L, D).
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep. A query that has no key left gives 0.
            causal: Query i sees keys 0 .. i only; L must equal S.

        Returns:
            (B, H, L, E).

        Raises:
            ValueError: for shapes that do not fit, or for what this mechanism can't do.
        """
        self._check_operands(q, k, v, key_mask, causal)
        return self.attend(q, k, v, key_mask=key_mask, causal=causal)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        """`forward` after its checks."""

    def features(self, x: Tensor, role: Literal["query", "key"] = "query") -> Tensor:
        """Explicit features (B, H, L, F) of x (B, H, L, D), whose inner products are the kernel that `forward` uses.

        Raises:
            ValueError: if the mechanism is not a kernel with finitely many features.
        """
        raise ArgumentError(f"{type(self).__name__} has no explicit features")

    def initial_state(self, batch_size: int) -> Any:
        """The state of decoding before the first token. States are never changed in place."""
        raise ArgumentError(f"{type(self).__name__} can't decode step by step")

    def absorb(self, state: Any, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """The state after more keys (B, H, S, D) and values (B, H, S, E). For inference: no gradients."""
        raise ArgumentError(f"{type(self).__name__} can't decode step by step")

    def read(self, state: Any, q: Tensor) -> Tensor:
        """Results (B, H, L, E) of queries against all that the state has absorbed. For inference: no gradients."""
        raise ArgumentError(f"{type(self).__name__} can't decode step by step")

    def step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token of causal attention: (B,H,1,D), (B,H,1,D), (B,H,1,E) -> result (B,H,1,E) and the next state.

        Raises:
            ValueError: for more than one token, which would see each other.
        """
        self._check_operands(q_t, k_t, v_t, None, causal=True)
        if q_t.shape[2] != 1:
            raise ArgumentError(f"a step takes one token, got {q_t.shape[2]}; absorb a prompt and read from it instead")
        return self._step(q_t, k_t, v_t, state)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """`step` after its checks."""
        state = self.absorb(state, k_t, v_t)
        return self.read(state, q_t), state

    def _check_operands(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool) -> None:
        heads, head_dim, value_dim = self.num_heads, self.head_dim, self.value_dim
        for name, tensor, size in (("q", q, head_dim), ("k", k, head_dim), ("v", v, value_dim)):
            if tensor.dim() != 4 or tensor.shape[1] != heads or tensor.shape[3] != size:
                raise ArgumentError(
                    f"{name} must have shape (batch, {heads}, length, {size}), got {tuple(tensor.shape)}"
                )
        if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[2] != v.shape[2]:
            raise ArgumentError(
                "q, k and v must have the same batch size, and k and v the same length, "
                f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if key_mask is not None and (key_mask.shape != (k.shape[0], k.shape[2]) or key_mask.dtype != torch.bool):
            raise ArgumentError(
                f"key_mask must be a bool tensor of shape {(k.shape[0], k.shape[2])} (True = keep), "
                f"got {key_mask.dtype} of shape {tuple(key_mask.shape)}"
            )
        if causal and not self.supports_causal:
            raise ArgumentError(f"{type(self).__name__} has no causal form")
        if causal and q.shape[2] != k.shape[2]:
            raise ArgumentError(f"causal needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}")
        if not self.supports_cross and q.shape[2] != k.shape[2]:
            raise ArgumentError(
                f"{type(self).__name__} can't attend to another sequence: {q.shape[2]} queries, {k.shape[2]} keys"
            )
        if self.max_len is not None and max(q.shape[2], k.shape[2]) > self.max_len:
            raise ArgumentError(
                f"sequence of {max(q.shape[2], k.shape[2])} tokens is longer than max_len={self.max_len}"
            )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, value_dim={self.value_dim}"


@dataclass(frozen=True)
class AttentionEntry:
    """An attention that can be built by name."""

    build: Callable[..., AttentionMechanism]
    #: Options besides the sizes, with their defaults.
    options: Mapping[str, Any]
    summary: str


ATTENTIONS: Registry[AttentionEntry] = Registry("attention")

#: What every mechanism is built with, besides its own options.
_SIZES = ("num_heads", "head_dim", "value_dim", "max_len")


def register_mechanism(name: str, mechanism: type[AttentionMechanism], summary: str) -> None:
    """Give a mechanism a name. Its options are the other arguments of its constructor, with their defaults."""
    parameters = inspect.signature(mechanism).parameters
    options = {key: p.default for key, p in parameters.items() if key not in _SIZES}
    ATTENTIONS.add(name, AttentionEntry(mechanism, options, summary))


def attention_names() -> list[str]:
    """The names that `build_attention` knows."""
    return list(ATTENTIONS)


def attention_options(name: str) -> dict[str, Any]:
    """The options of an attention with their defaults, besides num_heads, head_dim, value_dim and max_len."""
    return dict(ATTENTIONS[name].options)


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
        ValueError: for an unknown name or a value that is not allowed.
        TypeError: for an option that the attention does not have.
    """
    entry = ATTENTIONS[name]
    for option in options:
        if option not in entry.options:
            allowed = ", ".join(entry.options) or "none"
            raise ArgumentTypeError(
                f"{name} has no option {option!r}{suggestion(option, entry.options)} Options: {allowed}"
            )
    return entry.build(num_heads=num_heads, head_dim=head_dim, value_dim=value_dim, max_len=max_len, **options)
