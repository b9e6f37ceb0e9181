"""Query, key, value and output projections around any attention, and rotary positions between the two."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from klformer.attention.base import AttentionMechanism
from klformer.attention.spec import AttentionSpec
from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.ops.rotary import places, rotate
from klformer.ops.spectral_product.parts import Parts


@dataclass(frozen=True)
class MultiheadState:
    """What a layer carries in decoding: the state of its attention, and how many tokens it has absorbed."""

    inner: Any
    num_tokens: int | Tensor  # (B,) where positions are rotary, and a mask left some out


class MultiheadAttention(nn.Module):
    """Multi-head attention of any kind: (B, L, model_dim) -> (B, L, model_dim).

    Head and value sizes are independent of the model size: the paper's Text model has 4 heads of 64 in a model of
    256, its Image model 8 heads of 8 in a model of 128.

    Args:
        model_dim: Size of a token.
        num_heads: Heads H.
        attention: The attention and its options, like "gmm-rks:num_frequencies=64"; see `attention_names()`.
        head_dim: Size D of queries and keys; model_dim / num_heads if None.
        value_dim: Size E of values; D if None.
        max_len: Longest sequence; only some attentions need it.
        bias: Whether the projections have a bias.
        causal: The layer will be used causally: refuse an attention that can't be.
        rotary: Rotate queries and keys by their position, see `ops.rotary`; what a mask leaves out takes no position.
            For self-attention: a memory must be the sequence that begins with x. If D is odd, the last channel is left
            alone.

    Raises:
        ArgumentError: sizes do not fit, or the attention can't do what is asked for.

    Examples:
        >>> import torch, klformer
        >>> layer = klformer.MultiheadAttention(model_dim=32, num_heads=4, attention="gmm-rks:num_frequencies=16")
        >>> x = torch.randn(2, 100, 32)
        >>> layer(x, key_mask=torch.ones(2, 100, dtype=torch.bool)).shape
        torch.Size([2, 100, 32])

        With a state. Two memories that are absorbed apart can be read together:

        >>> first = layer.absorb(layer.initial_state(batch_size=2), x[:, :60])
        >>> second = layer.absorb(layer.initial_state(batch_size=2), x[:, 60:])
        >>> torch.allclose(layer.read(layer.merge(first, second), x), layer(x), atol=1e-4)
        True

        Token by token, each seeing those before:

        >>> state = layer.prepare_decoding(batch_size=2)
        >>> for token in x[:, :3].split(1, dim=1):
        ...     out, state = layer.step(token, state)
        >>> out.shape, state.num_tokens
        (torch.Size([2, 1, 32]), 3)
        >>> chunk, state = layer.extend(x[:, 3:10], state)
        >>> chunk.shape, state.num_tokens
        (torch.Size([2, 7, 32]), 10)
    """

    def __init__(
        self,
        *,
        model_dim: int,
        num_heads: int,
        attention: str | AttentionSpec = "gmm-rks",
        head_dim: int | None = None,
        value_dim: int | None = None,
        max_len: int | None = None,
        bias: bool = False,
        causal: bool = False,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        check_count("model_dim", model_dim)
        check_count("num_heads", num_heads)
        if head_dim is None:
            if model_dim % num_heads:
                raise ArgumentError(f"model_dim={model_dim} is not a multiple of num_heads={num_heads}; give head_dim")
            head_dim = model_dim // num_heads
        spec = AttentionSpec.of(attention)
        self.mechanism: AttentionMechanism = spec.build(
            num_heads=num_heads, head_dim=head_dim, value_dim=value_dim, max_len=max_len
        )
        if causal and not self.mechanism.supports_causal:
            raise ArgumentError(f"attention {spec.name!r} has no causal form")
        if rotary and not (self.mechanism.uses_queries or self.mechanism.uses_keys):
            raise ArgumentError(
                f"attention {spec.name!r} looks at neither queries nor keys: no rotary positions for it"
            )
        if rotary and head_dim < 2:
            raise ArgumentError(f"rotary positions need a head_dim of at least 2, got {head_dim}")
        self.num_heads = num_heads
        self.causal = causal
        self.rotary = rotary
        self.head_dim = head_dim
        inner_dim, values_dim = num_heads * head_dim, num_heads * self.mechanism.value_dim
        self.query = _projection(model_dim, inner_dim, bias) if self.mechanism.uses_queries else None
        self.key = _projection(model_dim, inner_dim, bias) if self.mechanism.uses_keys else None
        self.value = _projection(model_dim, values_dim, bias)
        self.out = _projection(values_dim, model_dim, bias)

    def forward(self, x: Tensor, memory: Tensor | None = None, *, key_mask: Tensor | None = None) -> Tensor:
        """Attend from x to itself, or to a memory.

        Args:
            x: (B, L, model_dim).
            memory: (B, S, model_dim); x itself if None.
            key_mask: (B, L), or (B, S) with memory; True = keep.

        Returns:
            (B, L, model_dim).

        Raises:
            ArgumentError: a shape does not fit, or the attention can't attend to another sequence.
        """
        if memory is not None and not self.mechanism.supports_cross:
            raise ArgumentError(f"{type(self.mechanism).__name__} can't attend to another sequence")
        source = x if memory is None else memory
        for name, tokens in (("x", x), ("memory", source)):
            if tokens.dim() != 3 or tokens.shape[-1] != self.value.in_features:
                raise ArgumentError(
                    f"{name} must have the shape (batch, length, {self.value.in_features}), got {tuple(tokens.shape)}; "
                    "a single sequence is a batch of one: x[None]"
                )
        if self.mechanism.parts is not None:
            return self._attend_in_parts(x, source, key_mask, self.mechanism.parts)
        positions = self._positions(source, 0, key_mask)
        q, (k, v) = self._heads(self.query, x, positions), self._pair(source, positions)
        return self._merge(self.mechanism(q, k, v, key_mask=key_mask, causal=self.causal))

    def _attend_in_parts(self, x: Tensor, source: Tensor, key_mask: Tensor | None, parts: Parts) -> Tensor:
        """`forward` for this part of a sequence: keys first, so that queries are made while sums are under way."""
        count: int | Tensor = source.shape[1] if key_mask is None else key_mask.sum(1)
        positions = self._positions(source, parts.before(count, source.device) if self.rotary else 0, key_mask)
        k, v = self._pair(source, positions)
        begun = self.mechanism.begin(k, v, key_mask=key_mask, causal=self.causal)
        return self._merge(self.mechanism.finish(begun, self._heads(self.query, x, positions)))

    def initial_state(self, batch_size: int) -> MultiheadState:
        """The state of decoding before the first token. `absorb` and `step` leave it as it is and give another.

        Args:
            batch_size: Sequences B.

        Raises:
            ArgumentError: the attention has no states.
        """
        return MultiheadState(self.mechanism.initial_state(batch_size), num_tokens=0)

    def prepare_decoding(self, batch_size: int) -> MultiheadState:
        """As `initial_state`, for one generation, and faster: `absorb` and `step` change what is inside in place.

        The frequencies are computed once. The parameters and the noise must stay as they are.

        Args:
            batch_size: Sequences B.

        Raises:
            ArgumentError: the attention has no states.
        """
        return MultiheadState(self.mechanism.prepare_decoding(batch_size), num_tokens=0)

    def absorb(self, state: MultiheadState, tokens: Tensor, *, key_mask: Tensor | None = None) -> MultiheadState:
        """Return the state after more tokens to attend to: an encoder's memory, or a prompt.

        Args:
            state: What was absorbed before.
            tokens: (B, S, model_dim).
            key_mask: (B, S), True = keep.

        Raises:
            ArgumentError: the attention has no states.
        """
        positions = self._positions(tokens, state.num_tokens, key_mask)
        k, v = self._pair(tokens, positions)
        inner = self.mechanism.absorb(state.inner, k, v, key_mask=key_mask)
        return MultiheadState(inner, state.num_tokens + self._count(tokens, key_mask))

    def read(self, state: MultiheadState, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Attend from x to all that the state has absorbed.

        With rotary positions x has those of the last L tokens that were absorbed.

        Args:
            state: It stays as it is.
            x: (B, L, model_dim).
            key_mask: (B, L), True = keep: that with which they were absorbed.

        Returns:
            (B, L, model_dim).

        Raises:
            ArgumentError: positions are rotary, and fewer than L tokens were absorbed; or the attention has no states.
        """
        first = state.num_tokens - self._count(x, key_mask)
        if self.rotary and (bool((first < 0).any()) if isinstance(first, Tensor) else first < 0):
            raise ArgumentError(
                f"rotary positions: {x.shape[1]} tokens read from a state that has absorbed {state.num_tokens}; "
                "absorb a token before it reads"
            )
        q = self._heads(self.query, x, self._positions(x, first, key_mask))
        return self._merge(self.mechanism.read(state.inner, q))

    def merge(self, first: MultiheadState, second: MultiheadState) -> MultiheadState:
        """The state of two memories that were absorbed apart, as that of one after the other.

        Args:
            first: A state; it stays as it is.
            second: Another, of the same number of sequences.

        Raises:
            ArgumentError: the attention has no states that can be merged, or positions are rotary.
        """
        if self.rotary:
            raise ArgumentError("rotary positions: states absorbed apart all begin at position 0; absorb in turn")
        inner = self.mechanism.merge(first.inner, second.inner)
        return MultiheadState(inner, first.num_tokens + second.num_tokens)

    def extend(
        self, x: Tensor, state: MultiheadState, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, MultiheadState]:
        """Attend causally from the next tokens to themselves and to all that a state has absorbed before them.

        Args:
            x: The tokens, (B, L, model_dim).
            state: What came before.
            key_mask: (B, L), True = keep.

        Returns:
            The result (B, L, model_dim), and the state after the tokens.

        Raises:
            ArgumentError: the attention is no kernel attention.
        """
        positions = self._positions(x, state.num_tokens, key_mask)
        q = self._heads(self.query, x, positions)
        heads, inner = self.mechanism.extend(state.inner, q, *self._pair(x, positions), key_mask=key_mask)
        return self._merge(heads), MultiheadState(inner, state.num_tokens + self._count(x, key_mask))

    def step(self, x: Tensor, state: MultiheadState) -> tuple[Tensor, MultiheadState]:
        """One token of causal self-attention.

        Args:
            x: The token, (B, 1, model_dim).
            state: What came before.

        Returns:
            The result (B, 1, model_dim), and the next state.

        Raises:
            ArgumentError: there is more than one token, or the attention can't decode step by step.
        """
        positions = self._positions(x, state.num_tokens, None)
        heads, inner = self.mechanism.step(
            self._heads(self.query, x, positions), *self._pair(x, positions), state.inner
        )
        return self._merge(heads), MultiheadState(inner, state.num_tokens + 1)

    def _count(self, x: Tensor, key_mask: Tensor | None) -> int | Tensor:
        """How many positions tokens take."""
        return x.shape[1] if key_mask is None or not self.rotary else key_mask.sum(1)

    def _positions(self, x: Tensor, first: int | Tensor, key_mask: Tensor | None) -> Tensor | None:
        """Positions of tokens (B, L, .), broadcastable to (B, H, L); None if they have no effect."""
        if not self.rotary:
            return None
        found = places(x.shape[1], key_mask, first=first, device=x.device)
        return found.unsqueeze(1) if found.dim() == 2 else found

    def _heads(self, projection: nn.Linear | None, x: Tensor, positions: Tensor | None) -> Tensor:
        """(B, L, model_dim) -> (B, H, L, D), rotated by the first L positions; without memory if nobody looks at it."""
        if projection is None:
            return x.new_zeros(()).expand(x.shape[0], self.num_heads, x.shape[1], self.head_dim)
        heads = self._split(projection(x))
        return heads if positions is None else rotate(heads, positions[..., : x.shape[1]])

    def _pair(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens."""
        return self._heads(self.key, x, positions), self._split(self.value(x))

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
