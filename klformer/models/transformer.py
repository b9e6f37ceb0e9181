"""Pre-LN Transformer encoder and decoder around any attention, as in Long Range Arena.

x <- x + Attention(LN x);  [decoder: x <- x + Attention(LN x, memory)];  x <- x + FF(LN x);  LN at the end
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from klformer.attention import AttentionSpec, MultiheadAttention
from klformer.attention.multihead import MultiheadState
from klformer.errors import ArgumentError
from klformer.models.config import EncoderConfig
from klformer.models.streaming import encode_stream
from klformer.ops.spectral_product.parts import Parts
from klformer.ops.transforms import recomputed

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


class FeedForward(nn.Sequential):
    """Linear, activation, dropout, Linear."""

    def __init__(self, *, model_dim: int, hidden_dim: int, activation: str, dropout: float) -> None:
        first, second = nn.Linear(model_dim, hidden_dim), nn.Linear(hidden_dim, model_dim)
        for layer in (first, second):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
        super().__init__(first, ACTIVATIONS[activation](), nn.Dropout(dropout), second)


class TransformerLayer(nn.Module):
    """One block: self-attention, attention to a memory if it is a decoder's with one, feed-forward."""

    def __init__(self, config: EncoderConfig, attention: AttentionSpec, *, causal: bool, cross_attention: bool) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(config.model_dim)
        self.self_attention = _attention(config, attention, causal=causal, rotary=config.rotary)
        self.cross_norm = nn.LayerNorm(config.model_dim) if cross_attention else None
        # Positions of another sequence are not comparable with ours: no rotation.
        self.cross_attention = _attention(config, attention, causal=False, rotary=False) if cross_attention else None
        if self.cross_attention is not None and not self.cross_attention.mechanism.supports_cross:
            raise ArgumentError(f"attention {attention.name!r} can't attend to another sequence")
        self.ffn_norm = nn.LayerNorm(config.model_dim)
        self.ffn = FeedForward(
            model_dim=config.model_dim,
            hidden_dim=config.ffn_dim,
            activation=config.activation,
            dropout=config.dropout,
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        num_outputs: int | None = None,
    ) -> Tensor:
        """(B, L, model_dim) -> (B, L, model_dim), or only the first `num_outputs` positions of it."""
        keys = self.self_norm(x)
        # Where queries need not be as many as keys, those that nobody asks for are left out from the start.
        fewer = self.self_attention.mechanism.supports_cross and not self.self_attention.causal
        if num_outputs is not None and fewer:
            attended = self.self_attention(keys[:, :num_outputs], keys, key_mask=key_mask)
        else:
            attended = self.self_attention(keys, key_mask=key_mask)[:, :num_outputs]
        x = x[:, :num_outputs] + self.dropout(attended)
        if self.cross_attention is not None and self.cross_norm is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, key_mask=memory_mask))
        return self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.ffn(self.ffn_norm(x)))

    def attend_to(self, state: MultiheadState, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """The layer at x (B, L, model_dim), with all keys absorbed in a state already; without a memory."""
        x = x + self.dropout(self.self_attention.read(state, self.self_norm(x), key_mask=key_mask))
        return self._feed_forward(x)

    def extend(self, x: Tensor, state: MultiheadState, key_mask: Tensor | None) -> tuple[Tensor, MultiheadState]:
        """Return the layer at the next tokens x (B, L, model_dim) of a causal sequence, and the state after them."""
        attended, state = self.self_attention.extend(self.self_norm(x), state, key_mask=key_mask)
        x = x + self.dropout(attended)
        return self._feed_forward(x), state

    def initial_state(
        self, batch_size: int, memory: Tensor | None, memory_mask: Tensor | None, *, in_place: bool = False
    ) -> "LayerState":
        """The state before the first token; a memory is absorbed once and for all."""

        def begin(attention: MultiheadAttention) -> MultiheadState:
            return attention.prepare_decoding(batch_size) if in_place else attention.initial_state(batch_size)

        cross = None
        if self.cross_attention is not None and memory is not None:
            cross = self.cross_attention.absorb(begin(self.cross_attention), memory, key_mask=memory_mask)
        return LayerState(begin(self.self_attention), cross)

    def step(self, x: Tensor, state: "LayerState") -> "tuple[Tensor, LayerState]":
        """One token (B, 1, model_dim) and the next state."""
        attended, own = self.self_attention.step(self.self_norm(x), state.own)
        x = x + self.dropout(attended)
        if self.cross_attention is not None and self.cross_norm is not None and state.cross is not None:
            x = x + self.dropout(self.cross_attention.read(state.cross, self.cross_norm(x)))
        return self._feed_forward(x), LayerState(own, state.cross)


@dataclass(frozen=True)
class LayerState:
    """What a decoder layer carries from token to token: its own past, and the memory."""

    own: MultiheadState
    cross: MultiheadState | None


def _attention(config: EncoderConfig, attention: AttentionSpec, *, causal: bool, rotary: bool) -> MultiheadAttention:
    return MultiheadAttention(
        model_dim=config.model_dim,
        num_heads=config.num_heads,
        attention=attention,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        max_len=config.max_len,
        causal=causal,
        rotary=rotary,
    )


class _Stack(nn.Module):
    """Layers and the final normalisation."""

    #: Those who have the parts of a sequence, if it is in parts.
    parts: Parts | None = None

    def __init__(self, config: EncoderConfig, *, causal: bool, cross_attention: bool) -> None:
        super().__init__()
        self.config = config
        self.cross_attention = cross_attention
        self.layers = nn.ModuleList(
            TransformerLayer(config, attention, causal=causal, cross_attention=cross_attention)
            for attention in config.attention_of_layers()
        )
        self.norm = nn.LayerNorm(config.model_dim)

    def layer(self, index: int) -> TransformerLayer:
        """One of the layers.

        Args:
            index: From 0 on; from the end, if it is negative.

        Examples:
            >>> import klformer
            >>> encoder = klformer.TransformerEncoder(klformer.EncoderConfig(attention="softmax"))
            >>> type(encoder.layer(0).self_attention.mechanism).__name__
            'SoftmaxAttention'
        """
        layer = self.layers[index]
        assert isinstance(layer, TransformerLayer)
        return layer

    def _run(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        num_outputs: int | None = None,
    ) -> Tensor:
        if x.dim() != 3 or x.shape[-1] != self.config.model_dim:
            raise ArgumentError(
                f"x must have the shape (batch, length, {self.config.model_dim}), got {tuple(x.shape)}; "
                "a single sequence is a batch of one: x[None]"
            )
        if num_outputs is not None and num_outputs < 0:
            raise ArgumentError(f"num_outputs must be at least 0, got {num_outputs}")
        if num_outputs is not None and self.parts is not None:
            first = int(self.parts.before(x.shape[1], x.device))
            num_outputs = min(max(num_outputs - first, 0), x.shape[1])
        for index, layer in enumerate(self.layers):
            wanted = num_outputs if index == len(self.layers) - 1 else None
            if self.config.checkpoint_layers and self.training:
                x = recomputed(layer, x, key_mask, memory, memory_mask, wanted)
            else:
                x = layer(x, key_mask, memory, memory_mask, wanted)
        return self.norm(x)


class TransformerEncoder(_Stack):
    """(B, L, model_dim) -> (B, L, model_dim), every position seeing every position that is not padding.

    Args:
        config: Sizes and attention.
        causal: Every position sees itself and the past only. `TransformerDecoder` is the same and can generate.

    Raises:
        ValueError: if an attention can't be built with these sizes, or has no causal form where it should.

    Examples:
        >>> import torch, klformer
        >>> config = klformer.EncoderConfig(model_dim=32, num_layers=2, num_heads=4, attention="gmm-prf")
        >>> encoder = klformer.TransformerEncoder(config)
        >>> encoder(torch.randn(2, 100, 32), key_mask=torch.ones(2, 100, dtype=torch.bool)).shape
        torch.Size([2, 100, 32])
    """

    def __init__(self, config: EncoderConfig, *, causal: bool = False) -> None:
        super().__init__(config, causal=causal, cross_attention=False)
        self.causal = causal

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None, num_outputs: int | None = None) -> Tensor:
        """Encode sequences.

        Args:
            x: (B, L, model_dim).
            key_mask: (B, L), True = keep.
            num_outputs: Give the first so many positions only: the last layer does without the others then. A
                classifier looks at CLS alone. Of a sequence in parts, those of them that are here.

        Returns:
            (B, L, model_dim), or (B, num_outputs, model_dim).

        Raises:
            ArgumentError: a shape does not fit.
        """
        return self._run(x, key_mask, num_outputs=num_outputs)

    def encode_stream(
        self, chunks: Iterable[Tensor | tuple[Tensor, Tensor]], *, folder: Path | str | None = None
    ) -> Iterator[Tensor]:
        """Encode a sequence that does not fit memory, given and taken back in chunks; exactly what `forward` gives.

        Memory is that of one chunk and of one state a layer. A bidirectional encoder goes through the sequence once
        more than it has layers: a layer can read only when all keys were absorbed. What it goes through is kept in a
        file; computing it again from the start for every layer would take half as many passes as layers, each time. A
        causal encoder needs one pass and no file. For inference: no gradients.

        Args:
            chunks: (B, any length, model_dim) each, in order; or such a tensor and its key_mask (B, length).
            folder: Where the file is, B L model_dim numbers long; the system's place for temporary files if None. It
                is removed at the end.

        Yields:
            The encoded chunks, as long as those given. Those of a bidirectional encoder come after the last was given.

        Raises:
            ArgumentError: an attention has no state of fixed size, or dropout is at work.

        Examples:
            >>> import torch, klformer
            >>> encoder = klformer.TransformerEncoder(klformer.EncoderConfig(model_dim=16, attention="gmm-prf")).eval()
            >>> x = torch.randn(1, 90, 16)
            >>> chunks = list(encoder.encode_stream(x.split(40, dim=1)))
            >>> [chunk.shape[1] for chunk in chunks]
            [40, 40, 10]
            >>> torch.allclose(torch.cat(chunks, dim=1), encoder(x), atol=1e-4)
            True
        """
        return encode_stream(self, chunks, None if folder is None else Path(folder))


class TransformerDecoder(_Stack):
    """(B, L, model_dim) -> (B, L, model_dim), every position seeing itself and the past, and a memory if there is one.

    For generation, `initial_state` and `step` take one token at a time. With a linear attention a step costs the same
    at every position.

    Args:
        config: Sizes and attention.
        cross_attention: Attend to an encoder's output as well.

    Raises:
        ValueError: if the attention has no causal form, or can't attend to another sequence where it should.

    Examples:
        >>> import torch, klformer
        >>> config = klformer.EncoderConfig(model_dim=32, num_layers=2, num_heads=4, attention="gmm-rks")
        >>> decoder = klformer.TransformerDecoder(config).eval()
        >>> state = decoder.prepare_decoding(batch_size=1)
        >>> for token in torch.randn(5, 1, 1, 32):
        ...     out, state = decoder.step(token, state)
        >>> out.shape
        torch.Size([1, 1, 32])
    """

    def __init__(self, config: EncoderConfig, *, cross_attention: bool = False) -> None:
        super().__init__(config, causal=True, cross_attention=cross_attention)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Decode all positions at once.

        Args:
            x: (B, L, model_dim).
            memory: (B, S, model_dim), given if and only if there is cross-attention.
            key_mask: (B, L), True = keep.
            memory_mask: (B, S), True = keep.

        Returns:
            (B, L, model_dim).

        Raises:
            ArgumentError: a shape does not fit, or a memory is missing or not wanted.
        """
        self._check_memory(memory)
        return self._run(x, key_mask, memory, memory_mask)

    def initial_state(
        self, batch_size: int, memory: Tensor | None = None, *, memory_mask: Tensor | None = None
    ) -> tuple[LayerState, ...]:
        """The state before the first token. `step` leaves it as it is and gives another.

        Args:
            batch_size: Sequences B.
            memory: (B, S, model_dim), absorbed once and for all; given if and only if there is cross-attention.
            memory_mask: (B, S), True = keep.

        Returns:
            The states of all layers.

        Raises:
            ArgumentError: a memory is missing or not wanted, or an attention has no states.

        Examples:
            >>> import torch, klformer
            >>> config = klformer.EncoderConfig(model_dim=16, num_layers=1, attention="gmm-prf")
            >>> decoder = klformer.TransformerDecoder(config, cross_attention=True).eval()
            >>> memory, x = torch.randn(1, 20, 16), torch.randn(1, 1, 16)
            >>> start = decoder.initial_state(1, memory)
            >>> out, state = decoder.step(x, start)
            >>> torch.allclose(out, decoder(x, memory), atol=1e-5)
            True
        """
        return self._begin(batch_size, memory, memory_mask, in_place=False)

    def prepare_decoding(
        self, batch_size: int, memory: Tensor | None = None, *, memory_mask: Tensor | None = None
    ) -> tuple[LayerState, ...]:
        """As `initial_state`, for one generation, and faster: `step` changes what is inside in place.

        The frequencies of kernels are computed once. The parameters and the noise must stay as they are.

        Args:
            batch_size: Sequences B.
            memory: (B, S, model_dim), given if and only if there is cross-attention.
            memory_mask: (B, S), True = keep.

        Returns:
            The states of all layers.

        Raises:
            ArgumentError: a memory is missing or not wanted, or an attention has no states.
        """
        return self._begin(batch_size, memory, memory_mask, in_place=True)

    def _begin(
        self, batch_size: int, memory: Tensor | None, memory_mask: Tensor | None, *, in_place: bool
    ) -> tuple[LayerState, ...]:
        self._check_memory(memory)
        layers = (self.layer(index) for index in range(len(self.layers)))
        return tuple(layer.initial_state(batch_size, memory, memory_mask, in_place=in_place) for layer in layers)

    def step(self, x: Tensor, state: tuple[LayerState, ...]) -> tuple[Tensor, tuple[LayerState, ...]]:
        """Decode one token. Equal to the same position of `forward` in evaluation.

        Args:
            x: (B, 1, model_dim).
            state: Of `initial_state` or `prepare_decoding`, or of the step before.

        Returns:
            (B, 1, model_dim), and the next state.

        Raises:
            ArgumentError: there is more than one token.
        """
        states = []
        for index, layer_state in enumerate(state):
            x, layer_state = self.layer(index).step(x, layer_state)
            states.append(layer_state)
        return self.norm(x), tuple(states)

    def _check_memory(self, memory: Tensor | None) -> None:
        if (memory is not None) != self.cross_attention:
            expected = "given" if self.cross_attention else "None"
            raise ArgumentError(f"memory must be {expected}: cross_attention is {self.cross_attention}")
