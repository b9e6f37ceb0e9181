"""Encoders of texts, converted or softmax, as parts of something larger: an exported file, or a classifier.

An architecture is the content of an encoder's config.json: what it takes to build the encoder without its folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

from klformer.attention import AttentionSpec
from klformer.conversion.hf.classes import read_config
from klformer.conversion.hf.inputs import is_converted, load_model, load_tokenizer, longest_input
from klformer.conversion.hf.interface import NAME
from klformer.conversion.hf.positions import extend_positions
from klformer.conversion.hf.saving import encoder_folder, modules_of
from klformer.conversion.hosts import ConversionError
from klformer.conversion.record import read_records
from klformer.errors import ArgumentError, FileError
from klformer.files import read_json
from klformer.models.pooling import masked_mean

Pooling = Literal["none", "mean", "first"]
#: What an encoder takes, (batch, length) each.
INPUTS = ("input_ids", "attention_mask")
#: Files in which a folder says how many tokens of a text are read.
LIMITS = ("sentence_*_config.json", "tokenizer_config.json")
#: How sentence-transformers pools, by the names that it used before 6.
MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}


class TextEncoder(nn.Module):
    """A model of transformers that reads a text at once, and what is made of its hidden states.

    Args:
        model: An encoder.
        pooling: "none" for what the model gives; "mean" over the tokens or the "first" token of its hidden states.
        unit_length: Whether pooled embeddings have length 1.

    Raises:
        ConversionError: the model is not an encoder of texts.
    """

    def __init__(self, model: PreTrainedModel, *, pooling: Pooling = "none", unit_length: bool = False) -> None:
        super().__init__()
        kind = type(model).__name__
        if model.main_input_name != INPUTS[0]:
            raise ConversionError(f"{kind} is no encoder of texts: it reads {model.main_input_name}")
        if model.can_generate():
            raise ConversionError(f"{kind} is no encoder: it generates texts")
        if unit_length and pooling == "none":
            raise ArgumentError("embeddings of length 1 must be pooled: pooling must be 'mean' or 'first', got 'none'")
        self.model = model if pooling == "none" else model.base_model
        self.pooling, self._unit_length = pooling, unit_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores, hidden states (B, L, model_dim) or embeddings (B, model_dim)."""
        answer: Any = self.model(input_ids=input_ids, attention_mask=attention_mask)
        if self.pooling == "none":
            return answer.logits if "logits" in answer else answer.last_hidden_state
        hidden = answer.last_hidden_state
        pooled = hidden[:, 0] if self.pooling == "first" else masked_mean(hidden, attention_mask.bool())
        return normalize(pooled, dim=-1) if self._unit_length else pooled


def read_architecture(folder: Path, *, max_len: int | None = None) -> dict[str, Any]:
    """Return the architecture of the encoder in a folder, with more positions if texts are longer than it reads.

    Raises:
        FileError: the folder has no model that this version of transformers knows.
        ConversionError: its positions can't be extended.
    """
    body = _skeleton(encoder_folder(folder) / "config.json")
    longest = longest_input(body)
    if max_len is not None and longest is not None and max_len > longest:
        extend_positions(body, max_len, "repeat")
    return dict(json.loads(body.config.to_json_string()))


def build_encoder(architecture: Mapping[str, Any]) -> PreTrainedModel:
    """Return the encoder of an architecture, with random weights and without a head or a pooler.

    Raises:
        FileError: it is not one that this version of transformers knows.
    """
    source = Path("config.json")
    if architecture.get("model_type") == NAME:
        config = read_config(architecture, name_or_path="")
    elif (kind := str(architecture.get("model_type"))) in CONFIG_MAPPING:
        config = CONFIG_MAPPING[kind].from_dict(dict(architecture))
    else:
        raise FileError(f"{source}: model_type {kind!r} is not a family that this version of transformers knows")
    try:
        body: Any = AutoModel.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileError(f"{source}: transformers can't build this model: {error}") from error
    if getattr(body, "pooler", None) is not None:
        body.pooler = None
    return body


def _skeleton(file: Path) -> PreTrainedModel:
    """The encoder of a config.json, without numbers in it."""
    content = read_json(file)
    kind = getattr(transformers, (content.get("architectures") or [""])[0], None)
    if kind is not None and kind.can_generate():
        raise ConversionError(f"{file.parent} has a {kind.__name__}, which generates texts: give an encoder")
    try:
        with torch.device("meta"):
            body = build_encoder(content)
            TextEncoder(body)
            return body
    except FileError as error:
        raise FileError(f"{file.parent}: {error}") from error


def load_encoder(folder: Path, *, max_len: int) -> dict[str, Tensor]:
    """Return the weights of the encoder in a folder, by the names of `build_encoder`, with positions for texts of
    `max_len` tokens."""
    body: Any = load_model(folder).base_model
    longest = longest_input(body)
    if longest is not None and max_len > longest:
        extend_positions(body, max_len, "repeat")
    return {name: value for name, value in body.state_dict().items() if not name.startswith("pooler.")}


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Return the tokenizer of a folder as the library `tokenizers` writes it.

    Raises:
        FileError: it has none, or one that this library does not have.
    """
    tokenizer = load_tokenizer(folder)
    if not tokenizer.is_fast:
        raise FileError(f"{folder} has a tokenizer without tokenizer.json: save it as a fast one of transformers")
    return dict(json.loads(tokenizer.backend_tokenizer.to_str()))


def attention_of(folder: Path) -> AttentionSpec:
    """Return the attention of the encoder in a folder; that of its first converted layer, if it is converted."""
    if not is_converted(folder):
        return AttentionSpec(name="softmax")
    file = encoder_folder(folder) / "config.json"
    return next(iter(read_records(file, read_json(file)[NAME]).values())).attention


def usual_reading(folder: Path) -> tuple[Literal["cls", "mean"], int | None]:
    """Return how sentence-transformers pools with the encoder in a folder, the mean if it says nothing, and the tokens
    that a text has at most.

    Raises:
        FileError: it pools in another way.
    """
    place, modes = encoder_folder(folder), {"mean"}
    root = next((each for each in (folder, place.parent) if modules_of(each)), folder)
    for module in modules_of(root):
        if module["type"].endswith(".Pooling"):
            chosen = read_json(root / module["path"] / "config.json")
            modes = {str(chosen.get("pooling_mode", ""))} - {""}
            modes |= {MODES.get(name, name) for name, value in chosen.items() if "pooling_mode_" in name and value}
    if modes not in ({"cls"}, {"mean"}):
        raise FileError(f"{folder} pools by {' and '.join(sorted(modes))}: only the mean and CLS are supported")
    # Before sentence-transformers 6 in its own file, since then where transformers keeps it.
    settings = [read_json(file) for pattern in LIMITS for file in place.glob(pattern)]
    limits = [content.get(name) for content in settings for name in ("max_seq_length", "model_max_length")]
    known = [limit for limit in (*limits, longest_input(_skeleton(place / "config.json"))) if limit is not None]
    return ("cls" if "cls" in modes else "mean"), min(known, default=None)
