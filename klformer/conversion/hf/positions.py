"""Longer than the teacher: learned position embeddings of a model of transformers, extended.

    repeat        the rows one after the other, again and again: position i is position i mod n. Neighbours are told
                  apart as before; the same place in another block is not told apart
    interpolate   the rows drawn out: all places are told apart, neighbours by less

Models with rotary positions have no table; they read any length as they are. All count from the first token.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import PreTrainedModel

from klformer.conversion.hosts import ConversionError, Extension
from klformer.errors import ArgumentError

#: What families call their tables of positions.
TABLES = ("position_embeddings", "wpe")


def extend_positions(model: PreTrainedModel, max_positions: int, extension: Extension) -> None:
    """Make a model read sequences of `max_positions` tokens, in place.

    Raises:
        ConversionError: its positions are not a table of one row for each position.
        ArgumentError: it reads as many already.
    """
    tables = _tables(model)
    embeddings = [(name, module) for name, module in tables if isinstance(module, nn.Embedding)]
    if len(embeddings) != len(tables) or (not embeddings and not _is_rotary(model)):
        raise ConversionError(
            f"{type(model).__name__} has no table of learned positions and no rotary ones: max_positions must be None"
        )
    for _, table in embeddings:
        _extend(table, max_positions, extension)
    rows = max_positions + max((_offset(table) for _, table in embeddings), default=0)
    for module in model.modules():
        _extend_buffers(module, rows)
    model.config.max_position_embeddings = rows


def _extend(table: nn.Embedding, max_positions: int, extension: Extension) -> None:
    offset = _offset(table)
    special, rows = table.weight.detach()[:offset], table.weight.detach()[offset:]
    if max_positions <= len(rows):
        raise ArgumentError(f"max_positions must be above the {len(rows)} that the model has, got {max_positions}")
    table.weight = nn.Parameter(torch.cat([special, _longer(rows, max_positions, extension)]))
    table.num_embeddings = len(table.weight)


def _longer(rows: Tensor, count: int, extension: Extension) -> Tensor:
    """(n, model_dim) -> (count, model_dim)."""
    if extension == "repeat":
        return rows.repeat(-(-count // len(rows)), 1)[:count]
    drawn_out = interpolate(rows.T.unsqueeze(0).float(), size=count, mode="linear", align_corners=True)
    return drawn_out[0].T.to(rows.dtype).contiguous()


def _offset(table: nn.Embedding) -> int:
    """Rows before that of the first position: families like RoBERTa count from behind that of padding."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _extend_buffers(module: nn.Module, count: int) -> None:
    """Numbers of positions and types of tokens that a model keeps for its longest sequence."""
    for name in ("position_ids", "token_type_ids"):
        buffer = module._buffers.get(name)
        if buffer is not None:
            row = torch.arange(count) if name == "position_ids" else torch.zeros(count)
            module._buffers[name] = row.to(buffer).expand(1, -1)


def takes_places(model: nn.Module) -> bool:
    """Return whether a model of tokens takes their positions, which `place_tokens` can give to it."""
    return getattr(model, "base_model", None) is model and "position_ids" in signature(model.forward).parameters


def place_tokens(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Count positions from the first token that the mask keeps, unless they are given: a forward pre-hook.

    Softmax with rotary positions sees how far apart two tokens are; the finitely many frequencies of a kernel see where
    they are, too. Learned positions are those of the text alone.

    Raises:
        ArgumentError: there is padding in front, and the model counts its rotary positions itself (ESM).
    """
    named = dict(zip(signature(model.forward).parameters, args, strict=False)) | named
    mask, tokens = named.get("attention_mask"), named.get("input_ids")
    given = named.get("inputs_embeds") if tokens is None else tokens
    if given is None or mask is None or mask.dim() != 2 or named.get("position_ids") is not None:
        return (), named
    places = torch.arange(mask.shape[1], device=mask.device) - mask.long().argmax(1, keepdim=True)
    offset = max([0, *(_offset(table) for _, table in _tables(model) if isinstance(table, nn.Embedding))])
    if _is_rotary(model) and not hasattr(model, "rotary_emb"):
        if bool((places[:, 0] < 0).any()):
            raise ArgumentError(f"{type(model).__name__} counts rotary positions with padding in front: pad at the end")
    elif not offset or tokens is None:  # RoBERTa and its kind find padding in the tokens
        named["position_ids"] = places.clamp(min=0)[:, -given.shape[1] :] + offset
    return (), named


def _tables(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in TABLES]


def _is_rotary(model: nn.Module) -> bool:
    return any("rotary" in type(module).__name__.lower() for module in model.modules())
