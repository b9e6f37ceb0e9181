"""Query, key, value and output projections around any attention."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from klformer.attention.base import AttentionMechanism, build_attention
from klformer.checks import check_count
from klformer.errors import ArgumentError


class MultiheadAttention(nn.Module):
    """Multi-head attention of any kind: (B, L, model_dim) -> (B, L, model_dim).

    Head and value sizes are independent of the model size: the paper's Text model has 4 heads of 64 in a model of
    256, its Image model 8 heads of 8 in a model of 128.

    Args:
        model_dim: Size of a token.
        num_heads: Heads H.
        attention: Name of the attention; see `attention_names()`.
        head_dim: Size D of queries and keys; model_dim / num_heads if None.
        value_dim: Size E of values; D if None.
        max_len: Longest sequence; only some attentions need it.
        bias: Whether the projections have a bias.
        options: Options of the attention; see `attention_options(name)`.
        causal: The layer will be used causally: refuse an attention that can't be.
    """

    def __init__(
        self,
        *,
        model_dim: int,
        num_heads: int,
        attention: str = "gmm-rks",
        head_dim: int | None = None,
        value_dim: int | None = None,
        max_len: int | None = None,
        bias: bool = False,
        options: Mapping[str, Any] | None = None,
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_count("model_dim", model_dim)
        check_count("num_heads", num_heads)
        if head_dim is None:
            if model_dim % num_heads:
                raise ArgumentError(f"model_dim={model_dim} is not a multiple of num_heads={num_heads}; give head_dim")
            head_dim = model_dim // num_heads
        self.mechanism: AttentionMechanism = build_attention(
            attention, num_heads=num_heads, head_dim=head_dim, value_dim=value_dim, max_len=max_len, **(options or {})
        )
        if causal and not self.mechanism.supports_causal:
            raise ArgumentError(f"attention {attention!r} has no causal form")
        self.num_heads = num_heads
        self.causal = causal
        self.head_dim = head_dim
        inner_dim, values_dim = num_heads * head_dim, num_heads * self.mechanism.value_dim
        self.query = _projection(model_dim, inner_dim, bias) if self.mechanism.uses_queries else None
        self.key = _projection(model_dim, inner_dim, bias) if self.mechanism.uses_keys else None
        self.value = _projection(model_dim, values_dim, bias)
        self.out = _projection(values_dim, model_dim, bias)

    def forward(self, x: Tensor, memory: Tensor | None = None, *, key_mask: Tensor | None = None) -> Tensor:
        """Attend from x (B, L, model_dim) to itself, or to `memory` (B, S, model_dim).

        Args:
            key_mask: (B, L), or (B, S) with memory; True = keep.
        """
        if memory is not None and not self.mechanism.supports_cross:
            raise ArgumentError(f"{type(self.mechanism).__name__} can't attend to another sequence")
        source = x if memory is None else memory
        q, k, v = self._queries(x), self._keys(source), self._split(self.value(source))
        return self._merge(self.mechanism(q, k, v, key_mask=key_mask, causal=self.causal))

    def initial_state(self, batch_size: int) -> Any:
        """The state of decoding before the first token."""
        return self.mechanism.initial_state(batch_size)

    def absorb(self, state: Any, tokens: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """The state after more tokens (B, S, model_dim) to attend to: an encoder's memory, or a prompt."""
        k, v = self._keys(tokens), self._split(self.value(tokens))
        return self.mechanism.absorb(state, k, v, key_mask=key_mask)

    def read(self, state: Any, x: Tensor) -> Tensor:
        """Attend from x (B, L, model_dim) to all that the state has absorbed."""
        return self._merge(self.mechanism.read(state, self._queries(x)))

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token (B, 1, model_dim) of causal self-attention, and the next state."""
        heads, state = self.mechanism.step(self._queries(x), self._keys(x), self._split(self.value(x)), state)
        return self._merge(heads), state

    def _queries(self, x: Tensor) -> Tensor:
        return self._nothing(x) if self.query is None else self._split(self.query(x))

    def _keys(self, x: Tensor) -> Tensor:
        return self._nothing(x) if self.key is None else self._split(self.key(x))

    def _nothing(self, x: Tensor) -> Tensor:
        """The shape (B, H, L, D) of what the mechanism does not look at, without its memory."""
        return x.new_zeros(()).expand(x.shape[0], self.num_heads, x.shape[1], self.head_dim)

    def _split(self, x: Tensor) -> Tensor:
        """(B, L, H D) -> (B, H, L, D)."""
        return x.view(*x.shape[:2], self.num_heads, x.shape[-1] // self.num_heads).transpose(1, 2)

    def _merge(self, heads: Tensor) -> Tensor:
        """(B, H, L, E) -> (B, L, model_dim)."""
        return self.out(heads.transpose(1, 2).flatten(-2).to(self.out.weight.dtype))


def _projection(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
