"""Encoding in chunks what does not fit memory, exactly: layer by layer, with the sequence in a file in between.

A bidirectional layer takes two passes: all keys into its state, then every position against it. The second pass of a
layer and the first of the next are one: (layers + 1) passes in all, each of which reads a chunk, replaces it in the
file, and goes on to the next. A causal layer needs the state of what came before a chunk only, so that a chunk goes
through all layers at once.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from klformer.attention.multihead import MultiheadState
from klformer.attention.spectral import SpectralAttention
from klformer.errors import ArgumentError
from klformer.files import writing

if TYPE_CHECKING:
    from klformer.models.transformer import TransformerEncoder, TransformerLayer

Chunk = Tensor | tuple[Tensor, Tensor]


def encode_stream(encoder: "TransformerEncoder", chunks: Iterable[Chunk], folder: Path | None) -> Iterator[Tensor]:
    """See `TransformerEncoder.encode_stream`."""
    layers = [encoder.layer(index) for index in range(len(encoder.layers))]
    for index, layer in enumerate(layers):
        mechanism = layer.self_attention.mechanism
        if not mechanism.supports_parts:
            raise ArgumentError(
                f"layers.{index} has {type(mechanism).__name__}, which has no state of fixed size to stream with; "
                "kernel attentions have"
            )
        if not encoder.causal and isinstance(mechanism, SpectralAttention) and mechanism.window:
            raise ArgumentError(
                f"layers.{index} sees neighbours on both sides (window={mechanism.window}), which a stream has yet to "
                "read; a causal encoder streams with a window, others without"
            )
        if mechanism.parts is not None:
            raise ArgumentError("the sequences of this encoder are in parts, with other processes: stream one or none")
    if encoder.training and encoder.config.dropout:
        raise ArgumentError("encode_stream is for inference, and dropout is at work: call eval() first")
    checked = (_checked(encoder, chunk) for chunk in chunks)
    return _causal(encoder, layers, checked) if encoder.causal else _bidirectional(encoder, layers, checked, folder)


def _checked(encoder: "TransformerEncoder", chunk: Chunk) -> tuple[Tensor, Tensor | None]:
    x, key_mask = chunk if isinstance(chunk, tuple) else (chunk, None)
    if x.dim() != 3 or x.shape[-1] != encoder.config.model_dim:
        raise ArgumentError(
            f"a chunk must have the shape (batch, length, {encoder.config.model_dim}), got {tuple(x.shape)}"
        )
    return x, key_mask


@torch.no_grad()
def _causal(
    encoder: "TransformerEncoder",
    layers: "list[TransformerLayer]",
    chunks: Iterable[tuple[Tensor, Tensor | None]],
) -> Iterator[Tensor]:
    states: list[MultiheadState] = []
    for x, key_mask in chunks:
        states = states or [layer.self_attention.initial_state(x.shape[0]) for layer in layers]
        for index, layer in enumerate(layers):
            x, states[index] = layer.extend(x, states[index], key_mask)
        yield encoder.norm(x)


@torch.no_grad()
def _bidirectional(
    encoder: "TransformerEncoder",
    layers: "list[TransformerLayer]",
    chunks: Iterable[tuple[Tensor, Tensor | None]],
    folder: Path | None,
) -> Iterator[Tensor]:
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    with tempfile.TemporaryFile(dir=folder, prefix="klformer-stream-") as file:
        stored, masks, state = _StoredChunks(file.fileno(), folder), [], None
        for x, key_mask in chunks:
            stored.append(x)
            masks.append(key_mask)
            state = _absorb(layers[0], state, x, key_mask)
        for index, layer in enumerate(layers):
            state_here, state, position = state, None, cast("int | Tensor", 0)
            for number, key_mask in enumerate(masks):
                assert state_here is not None, "there is a chunk"
                x = stored[number]
                position = position + (x.shape[1] if key_mask is None else key_mask.sum(1))
                x = layer.attend_to(MultiheadState(state_here.inner, position), x, key_mask)
                if index + 1 == len(layers):
                    yield encoder.norm(x)
                else:
                    stored[number] = x
                    state = _absorb(layers[index + 1], state, x, key_mask)


def _absorb(
    layer: "TransformerLayer", state: MultiheadState | None, x: Tensor, key_mask: Tensor | None
) -> MultiheadState:
    attention = layer.self_attention
    state = attention.prepare_decoding(x.shape[0]) if state is None else state
    return attention.absorb(state, layer.self_norm(x), key_mask=key_mask)


class _StoredChunks:
    """Tensors in a file, one after the other; each can be replaced by one of its shape and type."""

    def __init__(self, descriptor: int, folder: Path) -> None:
        self._descriptor = descriptor
        self._folder = folder  # for what is said if it is full
        self._places: list[tuple[int, torch.Size, torch.dtype, torch.device]] = []
        self._end = 0

    def append(self, x: Tensor) -> None:
        self._places.append((self._end, x.shape, x.dtype, x.device))
        self._write(self._end, x)
        self._end += x.nbytes

    def __getitem__(self, number: int) -> Tensor:
        start, shape, dtype, device = self._places[number]
        data = bytearray(shape.numel() * dtype.itemsize)
        done = 0
        while done < len(data):
            done += os.preadv(self._descriptor, [memoryview(data)[done:]], start + done)
        return torch.frombuffer(data, dtype=dtype).view(shape).to(device) if data else torch.empty(shape, dtype=dtype)

    def __setitem__(self, number: int, x: Tensor) -> None:
        start, shape, dtype, _ = self._places[number]
        assert x.shape == shape, "a chunk stays as long as it is"
        self._write(start, x.to(dtype))

    def _write(self, start: int, x: Tensor) -> None:
        data = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        with writing(self._folder / "klformer-stream"):
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:].data, start + done)
